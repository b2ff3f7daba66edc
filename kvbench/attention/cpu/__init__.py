"""Decode attention on a CPU: a C++ kernel over kvbench's own words, compiled at first use for the machine."""
