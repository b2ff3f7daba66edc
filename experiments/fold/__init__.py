"""Runs and points to the cells of a table."""
