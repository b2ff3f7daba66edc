"""RULER: synthetic long-context tasks (Hsieh et al. 2024), generated as the authors' scripts do."""

from __future__ import annotations

from kvbench.tasks.ruler.task import Ruler

__all__ = ["Ruler"]
