"""Utilities for every other package: atomic files, failures, progress, schemas, the configuration folder."""
