"""Segments: runs of tokens that share a storage format."""
