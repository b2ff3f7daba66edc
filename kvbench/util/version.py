"""The version of kvbench."""

__version__ = "0.1.0"
