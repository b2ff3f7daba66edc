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
        new_tokens: number of tokens that every sequence generates; end-of-sequence tokens do not end it.
        repeats: number of timed prefills per point.
        untimed: number of prefills per point before the timed ones.
        warm_up: number of tokens generated once, before anything is timed.
        seed: seed of the random words in prompts, and of sampling.
        graphs, compile, prefill_chunk, prefill_rows: arguments of
            :func:`kvbench.decoding.autoregressive.generate`. CUDA graphs are used only in the measured generation, not
            in warm-up generations or timed prefills.
        temperature, top_p: sampling settings; a temperature of 0 is greedy.
        fill: ``prefill`` runs the prompt through the model; ``random`` fills the cache with random keys and values
            instead, and then no prefill is timed.
        compare: number of tokens per row that are generated again with eager steps, to compare them with the tokens
            that CUDA graphs generated; 0 for no comparison.
        stock: names of caches of stock transformers with which every point is measured too
            (:data:`kvbench.measure.stock.BASELINES`).
        read_rate: bandwidth of plain reads measured on this device, GB/s; None for the known rate of the GPU.
        census: whether to measure peak memory on a CPU, which takes an additional slow generation that counts live
            tensors. It has no effect on a GPU, where peak memory is always measured.
        options: kernels and back ends of the caches.
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
        """Return the sampling settings for `batch` rows, each with its own seed (`seed`, `seed` + 1, ...)."""
        return Sampling(self.temperature, self.top_p, [self.seed + row for row in range(batch)])
