"""Row length and learning rate as functions of the training's progress."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.tiny.config import OptimizerConfig, Phase


def length_at(phases: Sequence[Phase], progress: float) -> int:
    """Return the row length in tokens at `progress` in [0, 1]."""
    total = sum(phase.share for phase in phases)
    end = 0.0
    for phase in phases:
        end += phase.share / total
        if progress < end:
            return phase.length
    return phases[-1].length


def rate_at(config: OptimizerConfig, step: int, progress: float) -> float:
    """Return the learning rate of step `step` (from 0)."""
    if progress <= config.hold or config.hold >= 1.0:
        rate = config.rate
    else:
        left = max(0.0, (1.0 - progress) / (1.0 - config.hold))
        rate = config.rate * (config.final + (1.0 - config.final) * left)
    return rate * min(1.0, (step + 1) / config.warmup)
