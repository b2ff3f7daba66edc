"""Attention over a kvbench cache: one attention function and one mask function for every Hugging Face model."""
