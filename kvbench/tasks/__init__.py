"""Data sets: records to prompts with their spans, and scores of the answers. Knows nothing of models and caches."""

from kvbench.tasks.base import PromptRules, Sample, Task
from kvbench.tasks.load import load

__all__ = ["PromptRules", "Sample", "Task", "load"]
