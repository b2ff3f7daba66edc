"""Runs: samples in, rows out; the session that generates them, and the ranks that share one."""
