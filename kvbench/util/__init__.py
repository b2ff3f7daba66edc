"""Utilities that all other packages use: atomic files, failures, progress, schemas, the configuration folder."""
