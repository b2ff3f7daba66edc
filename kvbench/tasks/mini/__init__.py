"""`mini`: bundled, generated data that tells KV-cache methods apart on a laptop."""

from kvbench.tasks.mini.task import LENGTHS, Mini

__all__ = ["LENGTHS", "Mini"]
