"""Data sets: records to prompts with their spans, and scores of the answers. Knows nothing of models and caches."""

from kvbench.tasks.base import Sample, Task
from kvbench.tasks.load import load

__all__ = ["Sample", "Task", "load"]
