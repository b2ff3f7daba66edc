"""The meter of time and memory: measures a model with a method's cache at one prompt length and batch size at a time.

Each point is measured in this order: short generations, which time the prefill; on a CPU, a generation that counts live
tensors; a complete generation, from which all other figures come; and, on request, stock transformers. Running out of
memory is a result too: the figures then contain the number of bytes requested, and the process releases its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.cache.prompts import Prompts
from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.passes import prefill_groups
from kvbench.measure import stock
from kvbench.measure.how import How
from kvbench.measure.point_figures import (
    Figures,
    layer_bytes,
    nominal_bits,
    point_memory,
    point_times,
    predicted_point,
    step_traffic,
    weight_bytes,
)
from kvbench.measure.random_fill import go_on
from kvbench.profiling import device
from kvbench.profiling.machine import Counter, Reading, used
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.profiling.timing import synchronize
from kvbench.tasks.filled import filled_prompts
from kvbench.util.failures import bytes_asked, is_out_of_memory

if TYPE_CHECKING:
    from kvbench.methods.base import Method


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
        """Energy readings before the first step and after the last one; None where the counter was not read."""
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


__all__ = ["How", "Meter", "fresh_search"]

#: largest prompt of the generation that warms up, in tokens
WARM_PROMPT = 256
#: new tokens of a generation of which only the prefill is used
SHORT = 2


@dataclass
class Meter:
    """Meter of time and memory for one method and model, one point (prompt length and batch size) at a time.

    Args:
        model: the model, in evaluation mode and on its device.
        tokenizer: makes the prompts.

    Attributes:
        tokens: tokens that the measured generation of the last point produced, one list per sequence.
    """

    model: Any
    tokenizer: Any
    method: Method
    how: How
    tokens: list[list[int]] = field(default_factory=list, init=False)
    _warm: bool = field(default=False, init=False)
    _watch: Watch | None = field(default=None, init=False)

    @cached_property
    def _counter(self) -> Counter:
        return Counter.of(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the model, on which the inputs are created."""
        device: torch.device = self.model.device
        return device

    def point(self, prompt: int, batch: int) -> Figures:
        """Measure one point and return its figures.

        ``status`` is ``ok``, or ``oom`` if memory ran out. In the latter case there are no times or cache sizes, but
        the number of bytes that could not be allocated (``bytes_asked``) and the phase in which this happened
        (``phase``).

        Raises:
            CacheError: the model did not use the method's cache.
        """
        figures = self._attempt(prompt, batch, lambda: self._measured(prompt, batch))
        if self.how.stock and figures["status"] == "ok":
            figures["stock"] = {name: self.stock_point(name, prompt, batch) for name in self.how.stock}
        return figures

    def stock_point(self, name: str, prompt: int, batch: int) -> Figures:
        """Measure one point with a cache of :data:`kvbench.measure.stock.BASELINES`; result as for :meth:`point`."""
        return self._attempt(
            prompt, batch, lambda: stock.stock_point(name, self.model, self.batch(prompt, batch)[0], self.how)
        )

    def _attempt(self, prompt: int, batch: int, measure: Callable[[], Figures]) -> Figures:
        """Return a point's figures from ``measure()``, or, if memory ran out, the bytes requested and the phase."""
        point = {"prompt": prompt, "batch": batch, "new_tokens": self.how.new_tokens}
        release(self.device)
        try:
            with device.kept(strict=True):
                return {"status": "ok", **point, **measure()}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = {"bytes_asked": bytes_asked(error), "message": str(error)[:400]}
        # outside the except block the traceback no longer keeps the generation's tensors alive
        watch, self._watch = self._watch, None
        failure["phase"] = watch.at if watch else "search"
        del watch
        release(self.device)
        return {"status": "oom", **point, **failure, "weights": weight_bytes(self.model)}

    def warm(self, prompt: int = WARM_PROMPT) -> None:
        """Run one short generation at the first call, so that later timings include no initialisation or compilation.

        Its prompt has at most :data:`WARM_PROMPT` tokens.
        """
        if self._warm:
            return
        ids, prompts = self.batch(min(prompt, WARM_PROMPT), 1)
        self._generate(ids, prompts, self.how.warm_up, graphs="never", census=False)
        self._warm = True

    def batch(self, prompt: int, batch: int) -> tuple[Tensor, Prompts]:
        """Make a batch of prompts of exactly `prompt` tokens, without padding: ids ``[batch, prompt]`` and texts."""
        texts = filled_prompts(self.tokenizer, prompt, batch, self.how.seed)
        ids = torch.tensor(texts.ids, device=self.device)
        return ids, Prompts([0] * batch, [prompt] * batch, texts.contexts, texts.queries, ids, self.tokenizer.decode)

    def _measured(self, prompt: int, batch: int) -> Figures:
        self.warm(prompt)
        ids, prompts = self.batch(prompt, batch)
        prefills, searches = [], []
        random = self.how.fill == "random"
        for _ in range(0 if random else self.how.untimed + self.how.repeats - 1):
            generation, cache, _ = self._generate(ids, prompts, SHORT, graphs="never", census=False)
            prefills.append(generation.ttft_s)
            searches.append(cache.search_s)
            del generation, cache
            self._free()
        peaks = None
        if self.how.census and self.device.type == "cpu":
            peaks = self._generate(ids, prompts, self.how.new_tokens, census=True)[2].peaks
        generation, cache, watch = self._generate(ids, prompts, self.how.new_tokens, census=False)
        prefills = [*prefills, generation.ttft_s][0 if random else self.how.untimed :]
        searches = [*searches, cache.search_s][0 if random else self.how.untimed :]
        self.tokens = generation.tokens
        figures = point_times(generation, prefills, searches, batch, self.how.new_tokens)
        if random:
            rate = batch * (self.how.new_tokens - 1) / figures["decode_s"]
            figures |= {"fill": "random", "prefill_s": None, "ttft_s": None, "tokens_per_s": rate}
        figures |= point_memory(self.model, cache, (peaks or watch.peaks).row())
        figures |= {
            "path": str(cache.path),
            "reads_packed": bool(cache.reads_packed),
            "prefill_path": None if random else cache.progress.prefill.path,
            "layer_kv": layer_bytes(self.model, prompt, batch),
        }
        chunk, rows = min(self.how.prefill_chunk or prompt, prompt), batch
        if chunk == prompt and not random:
            rows = prefill_groups(cache, batch, prompt, None, self.how.prefill_rows)[0].stop
        figures["predicted"] = predicted_point(
            self.model, figures, prompt, batch, watch.bytes_before, bool(generation.rounds), rows * chunk
        )
        figures |= step_traffic(self.model, figures, self.how.read_rate)
        if self.method.speculation is not None and self.method.speculation.forced is not None:
            figures["forced"] = self.method.speculation.forced
        figures["nominal_bits"] = nominal_bits(cache)
        figures["energy"] = used(*watch.span, batch * (self.how.new_tokens - 1), self._counter.reason)
        if cache.notes:
            figures["note"] = cache.notes[0]
        del cache
        if self.how.compare and figures["stepping"].startswith("graph"):
            figures["same"] = self._compared(ids, prompts)
        return figures

    def _compared(self, ids: Tensor, prompts: Prompts) -> dict[str, int]:
        """Generate the first tokens again with eager steps; count them (``of``) and the equal ones (``alike``)."""
        self._free()
        captured, count = self.tokens, min(self.how.compare, self.how.new_tokens)
        eager = self._generate(ids, prompts, count, graphs="never", census=False)[0].tokens
        pairs = [pair for rows in zip(captured, eager, strict=True) for pair in zip(*rows, strict=False)]
        return {"of": len(pairs), "alike": sum(one == other for one, other in pairs)}

    def _free(self) -> None:
        """Return cached CUDA memory to the device before the next cache; a CPU's allocator keeps none."""
        if self.device.type == "cuda":
            release(self.device)

    def _generate(
        self, ids: Tensor, prompts: Prompts, new_tokens: int, *, graphs: str | None = None, census: bool
    ) -> tuple[Generation, Any, Watch]:
        """Run one generation in a new cache and return it, the cache and the observer.

        The cache is always allocated for ``how.new_tokens``, even if only `new_tokens` are generated. `graphs` None
        stands for ``how.graphs``.
        """
        watch = self._watch = Watch(PhasePeaks(self.device, census=census))
        with fresh_search(self.method), watch.peaks.run():
            length = ids.shape[1] + self.how.new_tokens
            cache = self.method.new_cache(self.model, prompts, max_length=length)
            cache.options = self.how.options
            watch.cache, watch.energy = cache, self._counter
            steps: dict[str, Any] = {
                "max_new_tokens": new_tokens,
                "sampling": self.how.sampling(ids.shape[0]),
                "observer": watch,
                "graphs": graphs or self.how.graphs,
                "compile": self.how.compile,
            }
            if self.how.fill == "random":
                generation = go_on(self.model, cache, *ids.shape, **steps, seed=self.how.seed)
            else:
                generation = generate(
                    self.model,
                    cache,
                    ids,
                    **steps,
                    prefill_chunk=self.how.prefill_chunk,
                    prefill_rows=self.how.prefill_rows,
                )
        watch.cache = self._watch = None
        return generation, cache, watch


@contextmanager
def fresh_search(method: Any) -> Iterator[None]:
    """Disable the disk cache of text embeddings inside a ``with`` block, so that Cocktail computes all of them.

    The time of its search is then the full one. For methods without a text encoder this does nothing.
    """
    name = getattr(method, "encoder", None)
    if not isinstance(name, str):
        yield
        return
    from kvbench.retrieval.embedding import EmbeddingStore
    from kvbench.retrieval.encoders import encoder

    searcher = encoder(name)
    stored = getattr(searcher, "store", None)
    if stored is None:
        yield
        return
    searcher.store = EmbeddingStore(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        searcher.store = stored  # type: ignore[attr-defined]
