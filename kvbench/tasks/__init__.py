"""Data sets: they turn records into prompts and score the answers, and know nothing of models and caches."""

from kvbench.tasks.base import PromptRules, Sample, Task
from kvbench.tasks.load import load

__all__ = ["PromptRules", "Sample", "Task", "load"]
