"""Measures time and memory of one point: a prompt length and a batch, through a model and a method's cache.

Shared by ``dataset=efficiency`` and ``python -m kvbench.bench memory | tpot | prefill``. A point is measured in a fixed
order: short generations for the prefill's time, on a CPU one under the census of live tensors, and a whole generation
from which everything else comes. Memory that ends is a result: the point's figures then say what was asked for, and the
process gets its memory back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.cache.prompts import Prompts
from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.passes import Rows, groups
from kvbench.decoding.sampling import Sampling
from kvbench.measure.point_figures import Figures, memory, predicted, times, weight_bytes
from kvbench.measure.random_fill import go_on
from kvbench.profiling import onednn
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.tasks.filled import filled
from kvbench.util.failures import bytes_asked, is_out_of_memory

if TYPE_CHECKING:
    from kvbench.methods.base import Method

#: tokens of the prompt of the generation that warms up
WARM_PROMPT = 256
#: new tokens of a generation that is there for its prefill
SHORT = 2


@dataclass(frozen=True, kw_only=True)
class How:
    """How points are measured.

    Args:
        new_tokens: generated for every sequence, exactly.
        repeats: prefills that are timed.
        warm_up: tokens generated once, before anything is timed.
        seed: of the prompts' words, and of draws.
        graphs, compile, prefill_chunk, prefill_rows: as :func:`kvbench.decoding.autoregressive.generate` takes them;
            generations that only warm up or are there for their prefill are never captured.
        temperature, top_p: 0: greedy.
        fill: ``prefill``, or ``random``: random keys and values in place of the prompt's, and no times of a prefill.
        census: count live tensors on a CPU (one more generation, slow), which has no peaks otherwise.
        options: kernels and back ends of its caches.
    """

    new_tokens: int
    repeats: int = 3
    warm_up: int = 8
    seed: int = 0
    graphs: str = "always"
    compile: bool = False
    prefill_chunk: int | None = None
    prefill_rows: Rows = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    fill: Literal["prefill", "random"] = "prefill"
    census: bool = True
    options: Options = field(default_factory=Options)

    def sampling(self, batch: int) -> Sampling:
        """A seed for each row."""
        return Sampling(self.temperature, self.top_p, [self.seed + row for row in range(batch)])


@dataclass
class Watch:
    """Observer of one generation: peaks, how far it came, and what the cache held when the first step began."""

    peaks: PhasePeaks
    cache: Any = None
    at: str = "search"
    held: int | None = None

    def phase(self, name: str) -> None:
        """A phase begins."""
        if name == "decode" and self.cache is not None:
            self.held = self.cache.bill().used.total
        self.at = name
        self.peaks.phase(name)


@dataclass
class Meter:
    """Measures points of one model and method.

    Args:
        model: in evaluation mode, where it is to run.
        tokenizer: makes the prompts' words.
        method: its caches are measured.
        how: settings.

    Attributes:
        tokens: what the whole generation of the last point gave, row by row.
    """

    model: Any
    tokenizer: Any
    method: Method
    how: How
    tokens: list[list[int]] = field(default_factory=list, init=False)
    _warm: bool = field(default=False, init=False)
    _watch: Watch | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.model.device
        return device

    def point(self, prompt: int, batch: int) -> Figures:
        """Figures of one point; ``status`` is ``ok`` or ``oom`` (with ``bytes_asked`` and ``phase``).

        Raises:
            CacheError: the model did not use the method's cache.
        """
        point = {"prompt": prompt, "batch": batch, "new_tokens": self.how.new_tokens}
        release(self.device)
        try:
            with onednn.kept(strict=True):
                self.warm(prompt)
                return {"status": "ok", **point, **self._measured(prompt, batch)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            lost = {"bytes_asked": bytes_asked(error), "message": str(error)[:400]}
        # the error is gone, and with its traceback what the generation held
        watch, self._watch = self._watch, None
        lost["phase"] = watch.at if watch else "search"
        del watch
        release(self.device)
        return {"status": "oom", **point, **lost, "weights": weight_bytes(self.model)}

    def warm(self, prompt: int = WARM_PROMPT) -> None:
        """Once: a short generation of one sequence, after which nothing is initialised or compiled any more."""
        if self._warm:
            return
        ids, told = self.batch(min(prompt, WARM_PROMPT), 1)
        self._generate(ids, told, self.how.warm_up, graphs="never", census=False)
        self._warm = True

    def first_tokens(self, prompt: int, batch: int, count: int, graphs: str = "never") -> list[list[int]]:
        """The first `count` new tokens of each row of a point, stepped in another way."""
        release(self.device)
        ids, told = self.batch(prompt, batch)
        return self._generate(ids, told, count, graphs=graphs, census=False)[0].tokens

    def batch(self, prompt: int, batch: int) -> tuple[Tensor, Prompts]:
        """Prompts of exactly `prompt` tokens ``[batch, prompt]``, and what the cache is told about them."""
        made = filled(self.tokenizer, prompt, batch, self.how.seed)
        ids = torch.tensor(made.ids, device=self.device)
        told = Prompts([0] * batch, [prompt] * batch, made.contexts, made.queries, ids, self.tokenizer.decode)
        return ids, told

    def _measured(self, prompt: int, batch: int) -> Figures:
        ids, told = self.batch(prompt, batch)
        prefills, searches = [], []
        random = self.how.fill == "random"
        for _ in range(0 if random else self.how.repeats - 1):
            generation, cache, _ = self._generate(ids, told, SHORT, graphs="never", census=False)
            prefills.append(generation.ttft_s)
            searches.append(cache.search_s)
            del generation, cache
            self._free()
        peaks = None
        if self.how.census and self.device.type == "cpu":
            peaks = self._generate(ids, told, self.how.new_tokens, census=True)[2].peaks
        generation, cache, watch = self._generate(ids, told, self.how.new_tokens, census=False)
        prefills.append(generation.ttft_s)
        searches.append(cache.search_s)
        self.tokens = generation.tokens
        figures = times(generation, prefills, searches, batch, self.how.new_tokens)
        if random:
            rate = batch * (self.how.new_tokens - 1) / figures["decode_s"]
            figures |= {"fill": "random", "prefill_s": None, "ttft_s": None, "tokens_per_s": rate}
        figures |= memory(self.model, cache, (peaks or watch.peaks).row())
        figures |= {"path": str(cache.path), "reads_packed": bool(cache.reads_packed)}
        chunk, rows = min(self.how.prefill_chunk or prompt, prompt), batch
        if chunk == prompt and not random:
            rows = groups(cache, batch, prompt, None, self.how.prefill_rows)[0].stop
        figures["predicted"] = predicted(
            self.model, figures, prompt, batch, watch.held, bool(generation.rounds), rows * chunk
        )
        return {**figures, "note": cache.notes[0]} if cache.notes else figures

    def _free(self) -> None:
        """Room for the next cache; a CPU's allocator keeps none of the last one's."""
        if self.device.type == "cuda":
            release(self.device)

    def _generate(
        self, ids: Tensor, told: Prompts, new_tokens: int, *, graphs: str | None = None, census: bool
    ) -> tuple[Generation, Any, Watch]:
        """One generation with a cache of its own, which has room for the whole answer however short this one is."""
        watch = self._watch = Watch(PhasePeaks(self.device, census=census))
        with fresh_search(self.method), watch.peaks.run():
            length = ids.shape[1] + self.how.new_tokens
            cache = self.method.new_cache(self.model, told, max_length=length)
            cache.options = self.how.options
            watch.cache = cache
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
    """Embeddings that earlier runs have kept stay out of the way: a search is timed with all that it has to do."""
    name = getattr(method, "encoder", None)
    if not isinstance(name, str):
        yield
        return
    from kvbench.retrieval.encoders import encoder
    from kvbench.retrieval.store import EmbeddingStore

    found = encoder(name)
    kept = getattr(found, "store", None)
    if kept is None:
        yield
        return
    found.store = EmbeddingStore(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        found.store = kept  # type: ignore[attr-defined]
