"""Decode attention over KVQuant's codes: a kernel that looks up levels, rotates keys and adds outliers."""
