"""One layer of a kvbench cache, with the interface that transformers expects.

The states of a layer (its methods are defined in :class:`~kvbench.cache.state.LayerState`, then
:class:`~kvbench.cache.rollback.Rollback`, :class:`~kvbench.cache.prompt_phase.PromptPhase` and :class:`KVLayer`):

===========  ==================================  ==========================  ========================================
state        entered by                          holds                       effect of new tokens
===========  ==================================  ==========================  ========================================
empty        ``__init__``, ``reset``             nothing                     the first ``update`` records shapes, dtype
                                                                             and device
open prompt  the first ``update``                ``prompt`` in full          ``extend_prompt``, attention as in stock
             (:mod:`~kvbench.cache.prompt_phase  precision (only if it       transformers, then ``end_chunk``
             `)                                  comes in chunks)
sealed       ``place`` (or ``place_chunk``,      ``keys_store``,             ``update`` calls the method's ``settle``,
             ``seal``): the prompt is complete   ``values_store``            which packs old tokens; then ``append``
frozen       ``progress.frozen``                 the same; only the tails    ``append``; ``take_back`` removes rejected
                                                 grow                        tokens (:mod:`~kvbench.cache.rollback`)
recorded     a captured step                     the same                    ``settle``; ``advance`` reserves the slots
                                                                             that the device writes to
===========  ==================================  ==========================  ========================================

Tokens are packed or dropped only at the start of the next step. Until then the newest ones are in full precision, so
rejected draft tokens can be rolled back. A sealed layer is never opened again, except where the rows of a batch are
prefilled in groups (``KVCache.only``).
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.nonfinite import located_in_tails
from kvbench.cache.policy import Policy
from kvbench.cache.progress import Progress
from kvbench.cache.prompt_phase import PromptPhase
from kvbench.cache.segments.base import uniform_rows
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.errors import CacheError, NonFiniteError

if TYPE_CHECKING:
    from kvbench.cache.kernels.at_once import PackedAtOnce


class Handle:
    """Handle that a layer's ``update`` returns to the model in place of key and value tensors.

    Only kvbench's attention can use it; from `layer` it reads the older tokens. Any other attempt to read the handle as
    a tensor raises CacheError. `fresh` are the keys ``[B, H, q, D]`` and the values ``[B, H, q, Dv]`` of the new
    tokens.
    """

    def __init__(self, layer: KVLayer, fresh: tuple[Tensor, Tensor]) -> None:
        self.layer = layer
        self._fresh: tuple[Tensor, Tensor] | None = fresh

    def claim(self) -> tuple[Tensor, Tensor]:
        """Hand over the keys and values of the new tokens to attention, which can be done only once.

        The handle then no longer refers to them, so that their memory can be freed.

        Raises:
            CacheError: they have already been claimed.
        """
        if self._fresh is None:
            raise CacheError(
                "attention ran twice after one cache update: the keys and values of this step were already used"
            )
        fresh, self._fresh = self._fresh, None
        return fresh

    def __getattr__(self, name: str) -> Any:
        raise CacheError(
            f"a kvbench cache was read as a tensor ('.{name}'), so the model does not use kvbench's attention. "
            "Create the cache with method.new_cache(model), which switches the model to it, and do not change "
            "attn_implementation afterwards"
        )


class KVLayer(PromptPhase, CacheLayerMixin):
    """The keys and values of one layer of a model, as transformers and kvbench's attention use them.

    :class:`kvbench.cache.state.LayerState` describes the arguments and attributes.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, method: Policy[KVLayer], index: int, progress: Progress, window: int | None = None) -> None:
        CacheLayerMixin.__init__(self)
        PromptPhase.__init__(self, method, index, progress, window)

    # -- transformers' interface ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See :meth:`PromptPhase.initialize`."""
        self.initialize(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Accept the keys and values of new tokens from the model; kvbench's attention stores and reads them later.

        They are rounded to the layer's dtype here, so that whatever attends to them reads what is stored.

        Once the prompt is complete, the method first packs or drops older tokens (:meth:`settle`), except while drafts
        may still be rejected.

        Args:
            key_states: keys of the new tokens after RoPE, ``[B, H, q, D]``.
            value_states: values of the new tokens, ``[B, H, q, Dv]``.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            The same :class:`Handle` twice, in place of keys and values.
        """
        if not self.is_initialized:
            self.initialize(key_states, value_states)
        if self.sealed and not self.progress.frozen:
            if self.index == 0:
                self.progress.watches.poll()
            self.settle()
        handle = Handle(self, (key_states.to(self.dtype), value_states.to(self.dtype)))
        self.seen += key_states.shape[2]
        return handle, handle

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, including padding and dropped tokens: the column of the next token."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for which transformers should build a mask, and the offset of the first, always 0.

        The keys are those of all tokens seen and of `query_length` new ones.
        """
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that the cache has no maximum length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see :meth:`kvbench.cache.KVCache.crop`."""
        tokens_to_remove = int(tokens_to_remove)  # transformers may pass a tensor
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.seen - tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return
        if self.prompt is None:
            self.take_back([count] * self.batch)
            return
        if self.observed is not None:
            raise CacheError(
                f"cannot take back {count} tokens before the prompt is complete, because method "
                f"{type(self.method).__name__.lower()} has already used their attention: "
                "start the prompt again with a new cache"
            )
        for segment in self.prompt:
            for row in range(self.batch):
                segment.drop_back(row, min(count, segment.lengths[row]))
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch (beam search); see :meth:`batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Reorder the rows of the batch; see :meth:`kvbench.cache.KVCache.batch_select_indices`."""
        if not self.is_initialized:
            return
        for segment in self.segments():
            segment.select(indices)
        self.order = [self.order[i] for i in indices.tolist()]
        self.firm = [self.firm[i] for i in indices.tolist()]
        self.batch = len(self.order)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    # -- decoding ---------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append new keys ``[B, H, q, D]`` and values ``[B, H, q, Dv]`` to the tails of the stores.

        They are rotated first to the basis in which the layer stores them (:meth:`rotated`).
        """
        for store, x in zip(self.stores(), self.rotated(keys, values), strict=True):
            tail = store.tail
            for rows in uniform_rows(list(zip(tail.starts, tail.lengths, strict=True))):
                tail.append(rows, x[rows].detach())

    def advance(self, count: int) -> list[tuple[int, int]]:
        """Reserve room for `count` tokens per row whose keys and values a captured step will write when it is replayed.

        Returns:
            For each row, where to write: the index of the first new key in the buffer of full-precision keys, and that
            of the first new value in the buffer of full-precision values. If the method packs tokens before they attend
            (``Method.eager``), the indices are those of packed tokens (:meth:`packed_at_once`).
        """
        packed = self.packed_at_once()
        if packed is not None:
            places = [segment.advance() for segment in packed]
        else:
            places = [store.tail.advance(count) for store in self.stores()]
        self.seen += count
        return list(zip(*places, strict=True))

    def packed_at_once(self) -> PackedAtOnce | None:
        """Return the segments of keys and of values to which a captured step's kernel quantizes its new tokens.

        None if the method does not pack tokens before they attend, or if no such kernel writes its segments
        (:mod:`kvbench.cache.kernels.at_once`).
        """
        if not self.method.eager:
            return None
        keys, values = (store.segments[-2] if len(store.segments) > 1 else None for store in self.stores())
        if isinstance(keys, NuqSegment) and isinstance(values, NuqSegment):
            return keys, values
        return (keys, values) if isinstance(keys, PackedSegment) and isinstance(values, PackedSegment) else None

    def settle(self, *, forget: bool = True) -> None:
        """Let the method pack or drop older tokens, so that all tokens of the layer are stored as it prescribes.

        A second call without new tokens has no effect. `forget` also drops the tokens that no later token sees, because
        they have left the layer's sliding window. It must be False while attention for the newest tokens is still to be
        computed, because these may see older tokens than a later one does.
        """
        if not self.sealed or not (self.method.settles or self.window):
            return
        groups = self.row_groups()
        if len(groups) > 1 and not self.window:
            before = self.lengths(groups[0])
            with suppress(NonFiniteError):  # found again, and located, by the calls below
                if self.method.settle_each(self):
                    self.note_moves(slice(0, self.batch), before)
                    return
        for rows in groups:
            before = self.lengths(rows)
            try:
                self.method.settle(self, rows)
            except NonFiniteError as error:
                raise located_in_tails(self, error, rows) from None
            if self.window and forget:
                self.method.forget(self, rows, self.hidden(rows.indices(self.batch)[0]))
            self.note_moves(rows, before)

    # -- copies -----------------------------------------------------------------------------------------------------

    def clone(self, progress: Progress) -> KVLayer:
        """Return an independent copy of the layer for a cache whose layers share `progress`."""
        twin = copy(self)
        twin.progress, twin.order, twin.firm = progress, list(self.order), list(self.firm)
        twin.paths, twin.pairs = set(self.paths), set(self.pairs)
        twin.keys_store = self.keys_store and self.keys_store.clone()
        twin.values_store = self.values_store and self.values_store.clone()
        if self.prompt is not None:
            twin.prompt = (self.prompt[0].clone(), self.prompt[1].clone())
        if twin.keys_store is not None:
            twin.join_cache()
        return twin
