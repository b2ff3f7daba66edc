"""The cache of a method: transformers' ``Cache``, built on kvbench's stores."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.cache import together
from kvbench.cache.bill import Bill, count_bytes
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Options, Prefill, Progress
from kvbench.cache.prompts import Prompts
from kvbench.cache.state_layer import StateLayer, layers_of, no_rollback
from kvbench.cache.together import copy_newest
from kvbench.errors import CacheError
from kvbench.models.layers import LayerKind

if TYPE_CHECKING:
    from kvbench.cache.policy import Policy


class KVCache(Cache):
    """A method's cache of the keys and values of all layers, to pass to a model as ``past_key_values``.

    ``method.new_cache(model)`` creates it.

    Args:
        layers: number of attention layers.
        prompts: what the method may need to know about the prompts before prefill, such as their padding and the text
            of their questions; None if unknown.
        max_length: number of tokens to allocate for; None if unknown. Buffers grow if it is exceeded.
        windows: for each layer, the size of its sliding window in tokens, or None if it has none; None in place of the
            list if no layer has one.
        kinds: for each layer of the model, what it keeps of earlier tokens (:func:`kvbench.models.layers.layer_kinds`);
            `layers` and `windows` are then ignored. None if all layers keep keys and values only.

    Attributes:
        layers: all layers of the model in order, by which transformers addresses them. :attr:`kv_layers` and
            :attr:`state_layers` are those with keys and values and those with a state of fixed size.
    """

    layers: list[Any]

    def __init__(
        self,
        method: Policy[KVLayer],
        layers: int,
        prompts: Prompts | None = None,
        max_length: int | None = None,
        windows: Sequence[int | None] | None = None,
        kinds: Sequence[LayerKind] | None = None,
    ) -> None:
        self.method = method
        self.progress = Progress(Prefill(prompts), max_length)
        #: seconds that the method spent on the prompts before prefill (chunk search), part of TTFT; None if unknown
        self.search_s: float | None = 0.0
        #: for each row the method's remarks on it (chunks per width, thresholds, ...) as JSON data, or None
        self.notes: list[dict[str, Any]] | None = None
        #: the draft model's own cache, which is given the same prompt (:meth:`lead`)
        self.follower: KVCache | None = None
        #: True once the warning that transformers' own generate() does not speculate was given
        self.said_slow = False
        if kinds is None:
            kinds = [LayerKind(window=window) for window in ([None] * layers if windows is None else windows)]
        super().__init__(layers=list(layers_of(method, kinds, self.progress)))
        for layer in self.kv_layers:
            layer.layers = len(self.kv_layers)

    @property
    def kv_layers(self) -> list[KVLayer]:
        """The layers that keep keys and values, in order; in a hybrid model, fewer than :attr:`layers`."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The layers that keep a state of fixed size (linear attention, Mamba, convolution); some also keep keys."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @property
    def one_by_one(self) -> bool:
        """True if the model must read further tokens one by one, as passes over several would reset its states."""
        return any(layer.one_by_one and any(layer.has_previous_state.values()) for layer in self.state_layers)

    @property
    def options(self) -> Options:
        """The choice of kernels and back ends for this cache and for a draft's own cache, if there is one."""
        return self.progress.options

    @options.setter
    def options(self, options: Options) -> None:
        self.progress.options = options
        if self.follower is not None:
            self.follower.options = options

    @property
    def storage(self) -> torch.dtype | None:
        """Dtype in which the cache stores exact tokens; None: that of the keys that the model computes.

        Keys and values are rounded to it once, so a model may compute in float32 over a cache in bfloat16. Setting it
        raises CacheError unless the cache is empty.
        """
        return self.progress.storage

    @storage.setter
    def storage(self, dtype: torch.dtype) -> None:
        for cache in (self, *([] if self.follower is None else [self.follower])):
            if any(layer.is_initialized for layer in cache.kv_layers):
                raise CacheError("the cache holds tokens already: set its storage before the first forward pass")
            cache.progress.storage = dtype

    # -- a draft's own cache ----------------------------------------------------------------------------------------

    def lead(self, follower: KVCache | None) -> None:
        """Attach a second cache, which a draft reads in place of this one, so that one prefill fills both.

        When a layer has received the whole prompt, it passes the keys and values on to the same layer of `follower`.
        The time that the method of `follower` has spent on searching the context (Cocktail) is added to the `search_s`
        of this cache. If `follower` has `notes` on the prompts, they replace those of this cache. A `follower` of None
        detaches the second cache.

        Raises:
            CacheError: the model has layers with a state, which a draft cannot share.
        """
        self.follower = follower
        if follower is None:
            for layer in self.kv_layers:
                layer.follower = None
            return
        if self.state_layers:
            raise CacheError(no_rollback())
        known = self.search_s is not None and follower.search_s is not None
        self.search_s = (self.search_s or 0.0) + (follower.search_s or 0.0) if known else None
        if follower.notes is not None:
            self.notes = [{"draft": note} for note in follower.notes]
        for layer, other in zip(self.kv_layers, follower.kv_layers, strict=True):
            layer.follower = other

    # -- prefill in chunks ------------------------------------------------------------------------------------------

    def open_prefill(self) -> None:
        """Announce that the prompt will arrive in several forward passes (chunks), ended by :meth:`finalize`.

        Until then, all of it stays in full precision. The call is not needed if the cache was created with `prompts`,
        whose length shows when the prompt is complete.
        """
        self.progress.prefill.open = True

    @contextmanager
    def only(self, rows: slice, batch: int) -> Iterator[None]:
        """Within a ``with`` block, prefill only some rows of the batch, so that a batch can be prefilled in groups.

        The whole prompts of these rows must be prefilled within the block. The cache must have been created with
        `prompts`, so that its padding is known, and must support groups (:meth:`takes_groups`). `batch` is the number
        of rows in the whole batch.
        """
        followed = [] if self.follower is None else [self.follower.progress]
        for progress in (self.progress, *followed):
            progress.prefill.group = (rows, batch)
        for layer in self.kv_layers:
            layer.seen, layer.sealed = 0, False
        try:
            yield
        finally:
            for progress in (self.progress, *followed):
                progress.prefill.group = None

    def takes_groups(self) -> bool:
        """Return True if a batch may be prefilled in groups of rows, one group after another (:meth:`only`)."""
        caches = [self, *([self.follower] if self.follower is not None else [])]
        return not self.state_layers and all(
            not cache.method.quantized_prefill and all(layer.rope is None for layer in cache.kv_layers)
            for cache in caches
        )

    def finalize(self) -> None:
        """End a prefill in chunks: let the method store the prompt in each layer where it has not yet done so."""
        self.progress.prefill.open = False
        for layer in self.kv_layers:
            layer.seal()

    # -- transformers' interface ------------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """Always False: transformers must not compile a forward pass with this cache, because its buffers grow.

        Transformers' generation loop reads this property at each step. If the method speculates, which that loop does
        not support, the loop's first read issues a warning.
        """
        speculation = self.method.speculation
        asking = sys._getframe(1).f_globals.get("__name__") if speculation is not None else None
        if speculation is not None and asking == "transformers.generation.utils" and not self.said_slow:
            self.said_slow = True
            drafts = f"up to {speculation.most}" if speculation.gamma == "auto" else speculation.gamma
            warnings.warn(
                "transformers' own generate() does not speculate: it generates one token per step, "
                "although this cache's method "
                f"drafts {drafts} tokens per round. Use `from kvbench.decoding.custom import "
                "custom_generate` and "
                "model.generate(..., past_key_values=cache, custom_generate=custom_generate)",
                stacklevel=2,
            )
        return False

    def crop(self, max_length: int) -> None:
        """Remove the newest tokens; `max_length` has the same meaning as in transformers 5.17.

        Args:
            max_length: a negative number ``-k`` removes the newest k tokens; a positive number ``n`` keeps only the
                first n.

        Raises:
            CacheError: the cache has packed or dropped tokens since one of these tokens arrived; or the prompt is
                incomplete and the method has already used the attention over it (H2O, SnapKV); or the model has layers
                with a state, which cannot go back.
        """
        if self.state_layers and (max_length < 0 or 0 < max_length < self.get_seq_length()):
            raise CacheError(no_rollback())
        for layer in self.kv_layers:
            layer.crop(max_length)

    def take_back(self, counts: Sequence[int]) -> None:
        """Remove the newest tokens of each row, such as rejected drafts. Their number may differ between rows.

        Rows stay aligned at their right ends: a row that loses more tokens than another gets as many more columns of
        padding on its left. The rotary positions of its remaining tokens do not change.

        Raises:
            CacheError: the cache has packed or dropped tokens since one of these tokens arrived, or the prompt is not
                complete, or the model has layers with a state, which cannot go back.
        """
        if self.state_layers and any(counts):
            raise CacheError(no_rollback())
        for layer in self.kv_layers:
            layer.take_back(counts)
        least = min(counts)
        if max(counts) > least:
            starts = self.progress.padding.starts or [0] * len(counts)
            self.progress.padding.starts = [start + count - least for start, count in zip(starts, counts, strict=True)]
            if self.progress.positions.runs:
                self.progress.positions.shift([count - least for count in counts])

    def follow(self, leader: KVCache, counts: Sequence[int]) -> None:
        """Append the newest tokens of the target's cache, `leader`, to this one, which belongs to a draft.

        Of each row, ``counts[row]`` tokens are copied. Both caches must otherwise have seen the same tokens, and the
        target's must still hold them in full precision. Afterwards both caches have the same padding and the same
        length.

        Raises:
            CacheError: `leader` has not seen exactly ``max(counts)`` tokens more than this cache.
        """
        most = max(counts)
        if self.get_seq_length() + most != leader.get_seq_length():
            raise CacheError(
                f"the draft's cache has seen {self.get_seq_length()} tokens and the target's "
                f"{leader.get_seq_length()}, but they "
                f"should differ by {most}. After the prompt, let only the speculative decoding loop use the two caches"
            )
        for layer, source in zip(self.kv_layers, leader.kv_layers, strict=True):
            copy_newest(layer, source, counts)
        self.progress.padding.starts = list(leader.progress.padding.starts or [0] * len(counts))
        self.progress.positions = leader.progress.positions.clone()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch (beam search); see :meth:`batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        `indices` gives the old row of each row of the new batch, ``[new batch]``.
        """
        for layer in self.layers:
            layer.batch_select_indices(indices)
        self.progress.select(indices)
        if self.follower is not None:
            self.follower.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        if self.kv_layers and self.kv_layers[0].is_initialized:
            self.batch_select_indices(torch.arange(self.kv_layers[0].batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Drop all tokens, so that the same prompts can be run again. Other prompts need a new cache."""
        self.progress.reset()
        for layer in self.layers:
            layer.reset()
        if self.follower is not None:
            self.follower.reset()

    # -- kvbench's interface ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the method pack and drop tokens in every layer, so that all tokens are stored as it prescribes.

        Raises:
            NonFiniteError: a packed token contains NaN or Inf.
        """
        self.settle_layers()
        self.progress.watches.check()

    def settle_layers(self) -> None:
        """Let the method pack and drop tokens in every layer, without checking for NaN and Inf.

        Unlike :meth:`settle`, it does not wait for the device. A NaN or Inf that a kernel packs is recorded on the
        device, and a later check reports it. If the method allows it, layers that pack or drop the same tokens share a
        kernel launch.
        """
        if self.method.packs_together:
            together.settle(self.kv_layers, self.progress.rolls)
            return
        for layer in self.kv_layers:
            layer.settle()

    def bill(self, row: int | None = None) -> Bill:
        """Return how many bytes the cache takes, by part, including a draft's own cache if there is one.

        `used` counts one row of the batch, or the whole batch if `row` is None; `reserved` always counts the whole
        batch. This first calls :meth:`settle`. Afterwards it may be too late to remove the newest tokens
        (:meth:`take_back`).

        Raises:
            NonFiniteError: a packed token contains NaN or Inf.
        """
        self.settle()
        bill = count_bytes(self.kv_layers, self.state_layers, row)
        if self.follower is not None:
            bill.add(self.follower.bill(row))
        return bill

    def clone(self) -> KVCache:
        """Return an independent copy, for example to continue the same prompt in two ways."""
        twin = copy(self)
        twin.progress = self.progress.clone()
        twin.layers = [
            layer.clone(twin.progress) if isinstance(layer, KVLayer | StateLayer) else layer for layer in self.layers
        ]
        if self.follower is not None:
            twin.lead(self.follower.clone())
            twin.search_s, twin.notes = self.search_s, self.notes
        return twin

    @property
    def reads_packed(self) -> bool:
        """True if attention has read packed codes in at least one layer so far."""
        return any("packed" in layer.paths for layer in self.kv_layers)

    @property
    def path(self) -> str:
        """The kernels that have computed attention in decode steps, joined by ``+``; ``none`` before any step.

        Examples are ``cuda``, ``triton`` and ``reference (REASON)``, where REASON says why no kernel could be used. On
        a GPU, entries such as ``packing by torch (REASON)`` follow for other work that no kernel did.
        """
        paths = {path for layer in self.kv_layers for path in layer.paths} - {"packed"}
        others = {work for layer in self.kv_layers for segment in layer.segments() for work in segment.by_torch}
        return "+".join((*(sorted(paths) or ["none"]), *sorted(others)))
