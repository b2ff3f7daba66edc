"""The settings of a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbench.cache.options import Options
from kvbench.decoding.passes import Rows
from kvbench.decoding.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class How:
    """Settings of a measurement, shared by all of its points.

    Args:
        new_tokens: generated for every sequence, exactly.
        repeats: prefills that are timed.
        untimed: prefills of each point before the timed ones.
        warm_up: tokens generated once, before anything is timed.
        seed: of the prompts' words and of sampling.
        graphs, compile, prefill_chunk, prefill_rows: as :func:`kvbench.decoding.autoregressive.generate` takes them;
            generations that only warm up, or serve their prefill alone, are never captured.
        temperature, top_p: 0: greedy.
        fill: ``prefill``, or ``random``: random keys and values in place of the prompt's, and no times of a prefill.
        compare: tokens of a captured generation that are compared with those of eager steps; 0: none.
        stock: caches of stock transformers that every point is measured with too (:mod:`kvbench.measure.stock`).
        read_rate: GB/s of plain reads on this device, as measured; None: the known rate of the GPU.
        census: count live tensors on a CPU (one more generation, slow), which has no peaks otherwise.
        options: kernels and back ends of its caches.
    """

    new_tokens: int
    repeats: int = 3
    untimed: int = 0
    warm_up: int = 8
    seed: int = 0
    graphs: str = "always"
    compile: bool = False
    prefill_chunk: int | None = None
    prefill_rows: Rows = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    fill: Literal["prefill", "random"] = "prefill"
    compare: int = 0
    stock: tuple[str, ...] = ()
    read_rate: float | None = None
    census: bool = True
    options: Options = field(default_factory=Options)

    def sampling(self, batch: int) -> Sampling:
        """Return the sampling settings, with a seed for each row."""
        return Sampling(self.temperature, self.top_p, [self.seed + row for row in range(batch)])
