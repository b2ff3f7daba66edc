"""Measurement of time and memory at points; a point is one prompt length and batch size with a model and a method."""
