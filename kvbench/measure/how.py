"""The settings of a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbench.cache.progress import Options
from kvbench.decoding.passes import Rows
from kvbench.decoding.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class How:
    """Settings that all points of a measurement share; a point is one prompt length with one batch size.

    Args:
        new_tokens: number of tokens to generate for every sequence; an end-of-sequence token does not stop it earlier.
        repeats: number of timed prefills per point.
        untimed: number of prefills that run at each point before the timed ones, and are not timed.
        warm_up: number of tokens of a generation that runs once, before the first point.
        seed: seed of the random words in prompts, and of sampling.
        graphs, compile, prefill_chunk, prefill_rows: arguments of :func:`kvbench.decoding.autoregressive.generate`.
            CUDA graphs are used only in the measured generation, not in the warm-up or in timed prefills.
        temperature, top_p: sampling settings; a temperature of 0 is greedy.
        fill: where the cached keys and values come from. ``prefill``: the model reads the prompt. ``random``: they are
            drawn at random, so there is no prefill to time.
        compare: number of tokens per row to generate a second time without CUDA graphs, and to compare with the tokens
            generated with them; 0 for no comparison.
        stock: caches of stock transformers to measure at every point too, by their names in
            :data:`kvbench.measure.stock.BASELINES`.
        read_rate: read bandwidth that was measured on this device, in GB/s. None: use the known bandwidth of the GPU
            model.
        census: on a CPU, True to measure peak memory by counting live tensors, which takes one more, slow generation.
            On a GPU peak memory is always measured, and this setting has no effect.
        options: kernels and back ends that the caches use.
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
        """Return the sampling settings of `batch` sequences, whose seeds are `seed`, `seed` + 1, and so on."""
        return Sampling(self.temperature, self.top_p, [self.seed + row for row in range(batch)])
