"""Segments: runs of tokens in one storage format, one module per kind of format."""
