"""The cache that a method makes: transformers' ``Cache`` over packed stores."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.cache import rope, together
from kvbench.cache.bill import Bill, Parts
from kvbench.cache.layer import KVLayer
from kvbench.cache.options import Options
from kvbench.cache.progress import Prefill, Progress
from kvbench.cache.prompts import Prompts
from kvbench.errors import CacheError

if TYPE_CHECKING:
    from kvbench.cache.policy import Policy


class KVCache(Cache):
    """Keys and values of all layers; pass it as ``past_key_values``. Made by ``method.new_cache(model)``.

    Args:
        method: decides formats and moves.
        layers: number of attention layers.
        prompts: padding, spans and queries of the prompts, where known (:class:`Prompts`).
        max_length: tokens to allocate for, where known; buffers grow when it is passed.
        windows: for each layer its sliding window (:func:`kvbench.cache.sliding.windows`); None: there are none.
    """

    layers: list[KVLayer]

    def __init__(
        self,
        method: Policy[KVLayer],
        layers: int,
        prompts: Prompts | None = None,
        max_length: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.method = method
        self.progress = Progress(Prefill(prompts), max_length)
        #: seconds that the method took to look at the prompts before the prefill (chunk search); part of TTFT
        self.search_s: float | None = 0.0
        #: for each row what the method has to say about it (chunks per width, thresholds, ...), JSON data
        self.notes: list[dict[str, Any]] | None = None
        #: a draft's own cache, which is handed the same prompt (:meth:`lead`)
        self.follower: KVCache | None = None
        #: True once a warning has said that transformers' own generate() does not speculate
        self.said_slow = False
        windows = [None] * layers if windows is None else windows
        super().__init__(layers=[KVLayer(method, index, self.progress, window) for index, window in enumerate(windows)])

    @property
    def options(self) -> Options:
        """Kernels and back ends that serve this cache, and a draft's cache that it leads."""
        return self.progress.options

    @options.setter
    def options(self, options: Options) -> None:
        self.progress.options = options
        if self.follower is not None:
            self.follower.options = options

    # -- a draft's own cache ----------------------------------------------------------------------------------------

    def lead(self, follower: KVCache | None) -> None:
        """Hand the prompt to `follower` too, layer by layer, when it is placed: one prefill serves both caches.

        None: lead no cache any more.
        """
        self.follower = follower
        if follower is None:
            for layer in self.layers:
                layer.follower = None
            return
        known = self.search_s is not None and follower.search_s is not None
        self.search_s = (self.search_s or 0.0) + (follower.search_s or 0.0) if known else None
        if follower.notes is not None:
            self.notes = [{"draft": note} for note in follower.notes]
        for layer, other in zip(self.layers, follower.layers, strict=True):
            layer.follower = other

    # -- prefill in chunks ------------------------------------------------------------------------------------------

    def open_prefill(self) -> None:
        """Keep every layer exact until :meth:`finalize`: the prompt will come in chunks.

        Not needed where the cache was made with `prompts`: their length says when the prompt is complete.
        """
        self.progress.prefill.open = True

    @contextmanager
    def only(self, rows: slice, batch: int) -> Iterator[None]:
        """Run the prompts of these `rows` of a batch inside, whole; the other rows' come before or after.

        Only where :meth:`takes_groups` says so, and where the cache was made with the padding (:class:`Prompts`).
        """
        followed = [] if self.follower is None else [self.follower.progress]
        for progress in (self.progress, *followed):
            progress.prefill.group = (rows, batch)
        for layer in self.layers:
            layer.seen, layer.sealed = 0, False
        try:
            yield
        finally:
            for progress in (self.progress, *followed):
                progress.prefill.group = None

    def takes_groups(self) -> bool:
        """Return True if prompts may come some rows at a time (:meth:`only`)."""
        caches = [self, *([self.follower] if self.follower is not None else [])]
        return all(
            not cache.method.quantized_prefill and all(layer.rotation is None for layer in cache.layers)
            for cache in caches
        )

    def finalize(self) -> None:
        """End of the prompt: place the tokens of every layer that is still exact."""
        self.progress.prefill.open = False
        for layer in self.layers:
            layer.seal()

    # -- what transformers asks -------------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """False, as the stores grow. Transformers' own loops ask this step by step, and know nothing of speculation."""
        speculation = self.method.speculation
        asking = sys._getframe(1).f_globals.get("__name__") if speculation is not None else None
        if speculation is not None and asking == "transformers.generation.utils" and not self.said_slow:
            self.said_slow = True
            warnings.warn(
                "transformers' own generate() does not speculate: it takes one token a step, where this cache's method "
                f"drafts {speculation.gamma} a round. With `from kvbench.decoding.custom import custom_generate`: "
                "model.generate(..., past_key_values=cache, custom_generate=custom_generate)",
                stacklevel=2,
            )
        return False

    def crop(self, max_length: int) -> None:
        """Take back the newest k tokens for ``crop(-k)``; keep n for ``crop(n)``, as transformers 5.17 has it."""
        for layer in self.layers:
            layer.crop(max_length)

    def take_back(self, counts: Sequence[int]) -> None:
        """Take back the newest ``counts[row]`` tokens of each row, as acceptance differs from row to row.

        Every row still ends at the last column: a row that gives back more than another moves to the right, as if it
        had more padding on its left (rotary positions are those that its tokens were given, so nothing else changes).

        Raises:
            CacheError: something has moved since one of the tokens came, or the prompt is not finished.
        """
        for layer in self.layers:
            layer.take_back(counts)
        least = min(counts)
        if max(counts) > least:
            starts = self.progress.padding.starts or [0] * len(counts)
            self.progress.padding.starts = [start + count - least for start, count in zip(starts, counts, strict=True)]
            if self.progress.positions.runs:
                self.progress.positions.shift([count - least for count in counts])

    def follow(self, leader: KVCache, counts: Sequence[int]) -> None:
        """Take over the newest ``counts[row]`` tokens of `leader`, which has them in full precision.

        Both caches held the same tokens before; the rows of both end at the last column afterwards.

        Raises:
            CacheError: they did not.
        """
        most = max(counts)
        if self.get_seq_length() + most != leader.get_seq_length():
            raise CacheError(
                f"the draft's cache has seen {self.get_seq_length()} tokens and cannot follow one of "
                f"{leader.get_seq_length()} by {most}: use both in the speculative loop alone, from the prompt on"
            )
        for mine, source_layer in zip(self.layers, leader.layers, strict=True):
            for store, source in zip(mine.stores(), source_layer.stores(), strict=True):
                for row, count in enumerate(counts):
                    one = slice(row, row + 1)
                    newest = source.tail.view(one)
                    newest = newest[:, :, newest.shape[2] - count :]
                    if store is mine.keys_store:
                        newest = rope.handed_on(source_layer, one, newest, source_layer.seen - count)
                    store.tail.append(one, newest)
            mine.seen += most
            for row, order in enumerate(mine.order):
                if order is not None:
                    mine.order[row] = order + (most - counts[row])
                mine.firm[row] += most - counts[row]
        self.progress.padding.starts = list(leader.progress.padding.starts or [0] * len(counts))
        self.progress.positions = leader.progress.positions.clone()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows `beam_idx` the batch (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the rows `indices` the batch."""
        for layer in self.layers:
            layer.batch_select_indices(indices)
        self.progress.select(indices)
        if self.follower is not None:
            self.follower.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in a run."""
        if self.layers and self.layers[0].is_initialized:
            self.batch_select_indices(torch.arange(self.layers[0].batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything but the method and its prompts (make a new cache for other prompts)."""
        self.progress.reset()
        for layer in self.layers:
            layer.reset()
        if self.follower is not None:
            self.follower.reset()

    # -- what kvbench asks ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every layer into the state that the method prescribes for the tokens seen so far."""
        self.settle_layers()
        self.progress.watches.check()

    def settle_layers(self) -> None:
        """Settle all layers, alike windows in one launch, without a check for NaN and Inf (:meth:`settle` checks)."""
        if self.method.packs_together:
            together.settle(self.layers, self.progress.rolls)
            return
        for layer in self.layers:
            layer.settle()

    def bill(self, row: int | None = None) -> Bill:
        """Return the bytes held by part, for the whole batch or for one row (`reserved` is always the whole batch's).

        Settles the cache first, so the newest tokens may no longer be taken back afterwards.
        """
        self.settle()
        used, reserved, equivalent = Parts(), Parts(), 0
        for layer in self.layers:
            rows: Sequence[int] = range(layer.batch) if row is None else [row]
            if not layer.is_initialized:
                rows = []
            for segment in layer.segments():
                for part, buffer in segment.buffers():
                    reserved.add(part, buffer.untyped_storage().nbytes())
                for r in rows:
                    for part, count in segment.used(r).items():
                        used.add(part, count)
            for r in rows:
                equivalent += 2 * layer.heads * layer.visible_tokens(r) * (layer.key_dim + layer.value_dim)
        if self.follower is not None:
            other = self.follower.bill(row)
            for mine, others in ((used, other.used), (reserved, other.reserved)):
                for part, count in asdict(others).items():
                    mine.add(part, count)
        widths = [layer.dtype.itemsize for layer in self.layers if layer.is_initialized]
        return Bill(used, reserved, equivalent, max(widths, default=2))

    def clone(self) -> KVCache:
        """Return an independent copy, to continue the same prompt in two ways."""
        twin = copy(self)
        twin.progress = self.progress.clone()
        twin.layers = [layer.clone(twin.progress) for layer in self.layers]
        if self.follower is not None:
            twin.lead(self.follower.clone())
            twin.search_s, twin.notes = self.search_s, self.notes
        return twin

    @property
    def reads_packed(self) -> bool:
        """True if attention has read packed codes."""
        return any("packed" in layer.paths for layer in self.layers)

    @property
    def path(self) -> str:
        """The attention paths that have served the decode steps so far, joined by ``+``, such as ``sdpa``."""
        return "+".join(sorted({p for layer in self.layers for p in layer.paths} - {"packed"})) or "none"
