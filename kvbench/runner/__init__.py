"""Execution of runs: the samples of a data set become rows of results, in one process or on several ranks."""
