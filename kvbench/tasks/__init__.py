"""Data sets, which turn records into prompts and score the answers. They do not depend on models or caches."""

from kvbench.tasks.base import PromptRules, Sample, Task
from kvbench.tasks.load import load

__all__ = ["PromptRules", "Sample", "Task", "load"]
