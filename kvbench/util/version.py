"""The version number of kvbench."""

__version__ = "0.1.0"
