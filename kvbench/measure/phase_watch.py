"""The observer of a measured generation: peak memory by phase, the size of the cache, and the energy of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvbench.profiling.energy import Counter, Reading
from kvbench.profiling.memory import PhasePeaks
from kvbench.profiling.timing import synchronize


@dataclass
class Watch:
    """Observer that records the peak memory of one generation in each phase, and the size of its cache.

    Args:
        peaks: collects peak memory per phase.
        cache: cache of the generation; None while it is being made.
        at: current phase. ``search``: the cache is being made, for which Cocktail compares the context with the
            question. Then ``prefill``, ``decode`` and ``end``.
        bytes_before: bytes in use in the cache at the beginning of the phase ``decode``; None before that.
        energy: energy counter of the device; None: not read.
        readings: readings of the counter at the beginning of the phases ``steps`` and ``end``.
    """

    peaks: PhasePeaks
    cache: Any = None
    at: str = "search"
    bytes_before: int | None = None
    energy: Counter | None = None
    readings: list[Reading | None] = field(default_factory=list)

    @property
    def span(self) -> tuple[Reading | None, Reading | None]:
        """The readings before the first step and after the last one; None where the counter was not read."""
        return (self.readings[0], self.readings[-1]) if self.readings else (None, None)

    def phase(self, name: str) -> None:
        """Record that the phase `name` begins, and read the cache's size or the energy where it matters."""
        if name == "decode" and self.cache is not None:
            self.bytes_before = self.cache.bill().used.total
        if name in ("steps", "end") and self.energy is not None:
            synchronize(self.peaks.device)
            self.readings.append(self.energy.read())
        self.at = "decode" if name == "steps" else name
        self.peaks.phase(name)
