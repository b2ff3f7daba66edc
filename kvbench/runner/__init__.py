"""Runs: a session turns a data set's samples into rows of results, in one process or on several ranks."""
