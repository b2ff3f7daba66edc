"""`mini`: generated data on which KV-cache methods score differently, small enough for a laptop."""

from kvbench.tasks.mini.task import LENGTHS, Mini

__all__ = ["LENGTHS", "Mini"]
