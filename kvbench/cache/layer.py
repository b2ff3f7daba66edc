"""One layer of a kvbench cache, with the interface that transformers expects.

The states of a layer, in order:

===========  ==================================  ==========================  ========================================
state        entered by                          holds                       effect of new tokens
===========  ==================================  ==========================  ========================================
empty        ``__init__``, ``reset``             nothing                     the first ``update`` records shapes, dtype
                                                                             and device
open prompt  the first ``update``                ``prompt`` in full          ``extend_prompt``, attention as in stock
                                                 precision (only if it       transformers, then ``end_chunk``
                                                 comes in chunks)
sealed       ``place`` (or ``place_chunk``,      ``keys_store``,             ``update`` calls the method's ``settle``,
             ``seal``): the prompt is complete   ``values_store``            which packs old tokens; then ``append``
frozen       ``progress.frozen``                 the same; only the tails    ``append``; ``take_back`` removes rejected
                                                 grow                        tokens
recorded     a captured step                     the same                    ``settle``; ``advance`` reserves the slots
                                                                             that the device writes to
===========  ==================================  ==========================  ========================================

Tokens are packed or dropped only at the start of the next step. Until then the newest ones are in full precision, so
rejected draft tokens can be rolled back. A sealed layer is never opened again, except where the rows of a batch are
prefilled in groups (``KVCache.only``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache import sliding
from kvbench.cache.nonfinite import located, located_in_tails, watch_segments
from kvbench.cache.policy import Policy
from kvbench.cache.progress import Progress
from kvbench.cache.segments.base import FullSegment, Segment, Side, all_equal, uniform_rows
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.store import Store, extended
from kvbench.errors import CacheError, ConfigError, NonFiniteError
from kvbench.rotation import Transform

if TYPE_CHECKING:
    from kvbench.cache.kernels.at_once import PackedAtOnce
    from kvbench.quantizers.engine.arithmetic import Arithmetic

ALL = slice(None)


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


class KVLayer(CacheLayerMixin):
    """The keys and values of one layer of a model, as transformers and kvbench's attention use them.

    Keys are ``[B, H, n, D]`` and values ``[B, H, n, Dv]`` for n tokens.

    Args:
        method: the method, which decides in which format each token is stored (:class:`kvbench.methods.base.Method`).
        index: index of the layer.
        progress: state that all layers of a cache share (padding, positions, options, ...).
        window: the layer's sliding window: how many tokens a query sees, including its own. None if it sees all.

    Attributes:
        batch, heads, key_dim, value_dim, dtype, device: sizes, dtype and device of the stored keys and values; set when
            the first tokens arrive. Queries may have a wider dtype.
        sealed: True once the whole prompt is in the stores.
        seen: number of columns seen: tokens of a row, including padding and tokens dropped since.
        prompt: while a prompt arrives in chunks, its keys and its values so far, in full precision; else None.
        keys_store, values_store: stores of the keys and of the values; None until the first prompt tokens are stored.
        order: for each row, the column of the token in each slot, ``[n]`` or ``[H, n]``, on the CPU; None if the slots
            are in the order of columns. A method that permutes or evicts tokens sets it. Slots that were filled since
            may be missing at the end (:meth:`ordered` adds them).
        firm: for each row, the number of its first columns that can no longer be taken back, because the cache has
            packed or dropped tokens since they arrived.
        paths: names of the implementations (kernels or torch code) that have computed attention in this layer.
        pairs: which segments attention kernels have had to read side by side, as pairs (index of the key segment, index
            of the value segment) (:mod:`kvbench.attention.phases`).
        observed: the prompt's attention, if the method asks for it (``Method.observe_prompt``), until the prompt is
            stored; else None.
        follower: the same layer in the cache of a draft model, which gets the same prompt; else None.
        rope: function that applies the model's RoPE (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`), if keys are
            stored before RoPE; else None.
        layers: number of layers of the cache; None for a layer by itself.
        described: the description of the stores that the CPU kernel got last (:func:`kvbench.attention.phases.work`);
            None before the first.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def __init__(self, method: Policy[KVLayer], index: int, progress: Progress, window: int | None = None) -> None:
        super().__init__()
        self.method, self.index, self.progress, self.window = method, index, progress, window
        self.follower: KVLayer | None = None
        self.rope: Callable[..., Tensor] | None = None
        self.layers: int | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and return to the state before the first token."""
        self.is_initialized = False
        self.sealed = False
        self.seen = 0
        self.prompt: tuple[FullSegment, FullSegment] | None = None
        self.keys_store: Store | None = None
        self.values_store: Store | None = None
        self.order: list[Tensor | None] = []
        self.firm: list[int] = []
        self.paths: set[str] = set()
        self.pairs: set[tuple[int, int]] = set()
        self.observed: Tensor | None = None
        self.described: Any = None

    # -- the open prompt ---------------------------------------------------------------------------------------------

    def initialize(self, keys: Tensor, values: Tensor) -> None:
        """Take the layer's sizes and device from the first keys and values, and its dtype too if none was set."""
        self.batch, self.heads = keys.shape[:2]
        # these keys may be those of a group of rows, but the stores are for the whole batch
        if self.progress.prefill.group is not None:
            self.batch = self.progress.prefill.group[1]
        self.dtype, self.device = self.progress.storage or keys.dtype, keys.device
        self.key_dim, self.value_dim = keys.shape[-1], values.shape[-1]
        self.order, self.firm = [None] * self.batch, [0] * self.batch
        self.is_initialized = True

    def extend_prompt(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new prompt tokens, and return the keys and values of all prompt tokens so far.

        Chunks are collected in :attr:`prompt`. A prompt that arrives in one piece is not copied: its keys and values
        are returned as they are.
        """
        if self.prompt is None and self.progress.prefill.is_last(self.seen):
            return keys, values
        if self.prompt is None:
            room = max(self.progress.prefill.width or 0, self.seen)
            self.prompt = tuple(  # type: ignore[assignment]
                FullSegment(self.batch, self.heads, x.shape[-1], self.dtype, self.device, capacity=room)
                for x in (keys, values)
            )
        assert self.prompt is not None
        for segment, x in zip(self.prompt, (keys, values), strict=True):
            segment.append(ALL, x)
        return self.prompt[0].view(ALL), self.prompt[1].view(ALL)

    def end_chunk(self, keys: Tensor, values: Tensor) -> None:
        """Have the method store the prompt if it is now complete; call this after the attention of each chunk.

        The keys and values are those that :meth:`extend_prompt` returned.
        """
        if self.progress.prefill.is_last(self.seen):
            self.place(keys, values)

    def place(self, keys: Tensor, values: Tensor) -> None:
        """Have the method store the complete prompt, and free the buffers that collected its chunks.

        The method gets the keys and values in the basis in which the layer stores them (:meth:`rotated`). If the layer
        has a :attr:`follower` (the same layer in the cache of a draft model), the prompt is stored there first.

        Raises:
            NonFiniteError: a key or a value to be packed is NaN or Inf.
        """
        if self.follower is not None:
            self.follower.progress.prefill.group = self.progress.prefill.group
            if not self.follower.is_initialized:
                self.follower.initialize(keys, values)
            self.follower.seen = self.seen
            self.follower.progress.positions = self.progress.positions.clone()
            self.follower.place(self.handed_on(ALL, keys, 0), values)
        scores, self.observed = self.observed, None
        keys, values = keys.detach(), values.detach()
        stored_keys, stored_values = self.rotated(keys, values)
        if self.keys_store is None:
            self._make_stores()
        width = keys.shape[2]
        group = slice(0, self.batch) if self.progress.prefill.group is None else self.progress.prefill.group[0]
        starts = (self.progress.padding.starts or [0] * self.batch)[group]
        # `here` counts rows within the group, to which keys and values belong; `rows` within the batch
        for here in uniform_rows(starts):
            start, rows = starts[here][0], slice(group.start + here.start, group.start + here.stop)
            # tokens that the sliding window hides from all later queries are not even stored
            start += self.method.forgotten(self, self.hidden(rows.start))
            try:
                self.method.place(
                    self,
                    rows,
                    stored_keys[here, :, start:width],
                    stored_values[here, :, start:width],
                    None if scores is None else scores[here, ..., start:width],
                )
            except NonFiniteError as error:
                raise located(self, error, group, keys, values, torch.arange(width)) from None
            self.note_moves(rows, None)
        self.prompt = None
        # groups come in order: the one that ends with the last row completes the batch
        self.sealed = group.stop == self.batch

    def _make_stores(self) -> None:
        self.keys_store = self.method.make_store(self, "key")
        self.values_store = self.method.make_store(self, "value")
        self.join_cache()

    def join_cache(self) -> None:
        """Connect the layer's new segments to the cache's records of NaN and Inf and its queues of deferred work.

        With the queues, packing and rolling of several layers can share a kernel launch.
        """
        watch_segments(self)
        for segment in self.segments():
            if isinstance(segment, PackedSegment):
                segment.packs, segment.packer = self.progress.packs, self.progress.packer
            elif isinstance(segment, RollingSegment):
                segment.rolls = self.progress.rolls

    def place_chunk(self, keys: Tensor, values: Tensor) -> None:
        """Have the method store a chunk of the prompt before attention reads it (``Method.quantized_prefill``).

        Tokens that have left a sliding window are dropped first.

        Raises:
            NonFiniteError: a key or a value to be packed is NaN or Inf.
        """
        keys, values = keys.detach(), values.detach()
        stored_keys, stored_values = self.rotated(keys, values)
        if self.keys_store is None:
            self._make_stores()
        first = self.seen - keys.shape[2]
        starts = self.progress.padding.starts or [0] * self.batch
        for rows in uniform_rows(starts):
            begin = max(starts[rows][0] - first, 0)  # the chunk's columns before this one are padding
            if self.window and self.length(rows):
                self.seen = first  # the chunk is not stored yet: to the method its tokens would seem dropped
                self.method.forget(self, rows, self.hidden(rows.indices(self.batch)[0]))
                self.seen = first + keys.shape[2]
            if begin < keys.shape[2]:
                try:
                    self.method.place(self, rows, stored_keys[rows, :, begin:], stored_values[rows, :, begin:], None)
                except NonFiniteError as error:
                    raise located(self, error, rows, keys, values, torch.arange(first, self.seen)) from None
                self.note_moves(rows, None)
        self.sealed = self.progress.prefill.is_last(self.seen)

    def seal(self) -> None:
        """End a prefill in chunks: have the method store the prompt, unless it already has, and set :attr:`sealed`."""
        if not self.sealed and self.prompt is not None:
            self.place(self.prompt[0].view(ALL), self.prompt[1].view(ALL))
        self.sealed = self.keys_store is not None

    def handed_on(self, rows: slice, keys: Tensor, first: int) -> Tensor:
        """Convert keys for the :attr:`follower`: apply or undo RoPE if only one of both layers stores pre-RoPE keys.

        The keys, ``[rows, H, n, D]``, are those of consecutive columns from `first` on.
        """
        assert self.follower is not None
        mine, other = self.rope, self.follower.rope
        if (mine is None) == (other is None):
            return keys
        columns = torch.arange(first, first + keys.shape[2])
        positions = torch.stack([self.progress.positions.at(row, columns) for row in range(*rows.indices(self.batch))])
        if mine is not None:
            return mine(keys, positions)
        assert other is not None
        return other(keys.float(), positions, inverse=True).to(keys.dtype)

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
        """Return the segments of keys and of values into which a captured step's kernel packs its new tokens.

        None if the method does not pack tokens before they attend, or if no such kernel writes its segments
        (:mod:`kvbench.cache.kernels.at_once`).
        """
        if not self.method.eager:
            return None
        # the last segment is the exact tail; tokens are packed into the one before it
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
            # settle_each packs equally many tokens of all rows, so the first row shows whether anything has moved
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

    # -- rollback ----------------------------------------------------------------------------------------------------

    def take_back(self, counts: Sequence[int]) -> None:
        """Remove the newest tokens of each row from this layer; :meth:`kvbench.cache.KVCache.take_back` calls this.

        Raises:
            CacheError: the prompt is not complete; or the layer has packed or dropped tokens since one of these
                arrived, which cannot be undone. (The methods ``atom`` and ``kvquant`` can remove any token, because
                they pack each one on its own.)
        """
        least, stores = min(counts), self.stores()
        for row, count in enumerate(counts):
            available = min(self.seen - self.firm[row], sum(stores[0].signature(row)))
            # the tail's tokens are as they arrived; with a window, however, older ones that would show again are gone
            if self.method.gives_tail and self.window is None:
                available = max(available, min(store.tail.lengths[row] for store in stores))
            if count > available:
                raise CacheError(
                    f"cannot take back {count} tokens: in row {row} of layer {self.index}, only the newest {available} "
                    "can be removed, because the cache has already packed or dropped tokens. Roll back before the next "
                    "step and before bill()"
                )
        for row, count in enumerate(counts):
            for store in stores:
                store.drop_back(row, count)
            order = self.order[row]
            if order is not None:  # every row ends at the last column: rows that lose more than the least shift right
                self.order[row] = order[..., : sum(stores[0].signature(row))] + (count - least)
            self.firm[row] += count - least
        self.seen -= least
        # a method with `gives_tail` may have taken back firm tokens, too
        self.firm[:] = [min(firm, self.seen) for firm in self.firm]

    def lengths(self, rows: slice) -> list[tuple[int, ...]]:
        """Return the number of tokens in each segment: a tuple for the keys, then a tuple for the values.

        All of `rows` must have the same numbers.
        """
        row = rows.indices(self.batch)[0]
        return [store.signature(row) for store in self.stores()]

    def note_moves(self, rows: slice, before: list[tuple[int, ...]] | None) -> None:
        """Mark all tokens of some rows as firm (no longer removable) if an operation packed or dropped tokens.

        With a method that packs each token on its own (``Method.by_token``), only dropping counts. With one that sums
        up the attention of steps (``Method.observe_steps``), every operation counts, because the sum cannot be undone.
        `before` is the result of :meth:`lengths` before the operation; None if the operation has placed prompt tokens.
        """
        row = rows.indices(self.batch)[0]
        after, seen = self.lengths(rows), self.real_tokens(row)
        slots = min(map(sum, after))
        if before is None:  # prompt tokens moved if some were dropped, or stored outside the tail, the last segment
            moved = slots < seen or (any(any(lengths[:-1]) for lengths in after) and not self.method.by_token)
        else:
            moved = after != before and not (self.method.by_token and slots == min(map(sum, before)))
        if moved or self.method.observe_steps:
            self.firm[rows] = [self.seen] * len(self.firm[rows])

    # -- transformers' interface ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See :meth:`initialize`."""
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
        """Return the number of keys for which transformers should build a mask, and the offset of the first key, 0.

        The keys are those of all tokens seen and of `query_length` new ones.
        """
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that the cache has no maximum length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see :meth:`kvbench.cache.KVCache.crop`."""
        tokens_to_remove = int(tokens_to_remove)  # transformers may pass a tensor
        # despite its name, a positive argument is the number of tokens to keep; a negative one removes tokens
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
        self.described = None  # or it would keep the old buffers of all layers in memory

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are adjacent."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    # -- stores -----------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[Store, Store]:
        """Return the store of the keys and the store of the values.

        Raises:
            CacheError: there are no stores yet, because the prompt is not complete.
        """
        if self.keys_store is None or self.values_store is None:
            raise CacheError(
                f"layer {self.index} has no stores yet, because its prompt is not complete: call cache.finalize() first"
            )
        return self.keys_store, self.values_store

    def segments(self) -> list[Segment]:
        """Return the segments of both stores, keys first.

        Before the prompt is stored, return the two segments that collect its chunks, or none if there are no chunks.
        """
        if self.keys_store is not None and self.values_store is not None:
            return [*self.keys_store.segments, *self.values_store.segments]
        return list(self.prompt or ())

    def rolling(self) -> list[RollingSegment]:
        """Return the segments of both stores if all are rolling windows, as with StreamingLLM; else an empty list."""
        if self.keys_store is None:
            return []
        segments = self.segments()
        windows = [segment for segment in segments if isinstance(segment, RollingSegment)]
        return windows if len(windows) == len(segments) else []

    def length(self, rows: slice) -> int:
        """Return the number of slots of each row, which must be the same for all of `rows`."""
        return self.stores()[0].length(rows)

    def row_groups(self) -> list[slice]:
        """Divide the batch into runs of adjacent rows that one call can process together.

        The rows of a run have equal padding and, in every segment, equal numbers of tokens that begin at the same place
        in the buffer. After speculation, rows of equal length may begin at different places, because their windows were
        last moved at different steps.
        """
        segments = self.segments()
        # lists with one number per row; rows that agree in all of them can be processed together
        by_row = [self.progress.padding.starts or [0] * self.batch, *(segment.lengths for segment in segments)]
        by_row += [segment.starts for segment in segments if isinstance(segment, FullSegment)]
        if all(all_equal(numbers) for numbers in by_row):
            return [slice(0, self.batch)]
        return list(uniform_rows(list(zip(*by_row, strict=True))))

    # -- positions --------------------------------------------------------------------------------------------------

    def ordered(self, row: int) -> Tensor | None:
        """Return the column of the token in each slot of a row, after adding the newest slots to its :attr:`order`.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens; None if the slots are in the order of columns.
        """
        order = self.order[row]
        if order is None:
            return None
        missing = sum(self.stores()[0].signature(row)) - order.shape[-1]
        if missing > 0:
            new = torch.arange(self.seen - missing, self.seen).expand(*order.shape[:-1], missing)
            order = self.order[row] = extended(order, new)
        return order

    def positions(self, row: int) -> Tensor:
        """Return the column at which attention sees the token in each slot of a row.

        Unlike ``Method.positions``, it never returns None.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens, on the CPU.
        """
        order = self.method.positions(self, row)
        if order is not None:
            return order
        return torch.arange(self.first(row), self.seen)

    def hidden_slots(self, row: int, hidden: int) -> int:
        """Return how many slots at the front of a row hold only tokens outside the sliding window, in every head.

        `hidden` is the number of the row's oldest tokens that count as outside (:meth:`hidden`, or fewer).
        """
        positions = self.positions(row)
        if positions.ndim > 1:
            positions = positions.amax(0)
        # the cumulative product is 1 up to the first slot that is still visible, then 0
        return int((positions < self.start(row) + hidden).to(torch.uint8).cumprod(0).sum())

    def start(self, row: int) -> int:
        """Return the column of a row's first real token, which is also the number of its padding tokens."""
        starts = self.progress.padding.starts
        return starts[row] if starts else 0

    def first(self, row: int) -> int:
        """Return the column of the token in a row's first slot, for slots in the order of columns without a gap.

        It is greater than :meth:`start` if tokens that left a sliding window have been dropped.
        """
        return self.seen - sum(self.stores()[0].signature(row))

    # -- counts -----------------------------------------------------------------------------------------------------

    def real_tokens(self, row: int) -> int:
        """Return how many tokens a row has seen so far, not counting padding."""
        return self.seen - self.start(row)

    def hidden(self, row: int) -> int:
        """Return how many of a row's oldest tokens are outside the sliding window of every future query.

        This is 0 without a sliding window.
        """
        return 0 if self.window is None else max(self.real_tokens(row) - (self.window - 1), 0)

    def visible_tokens(self, row: int) -> int:
        """Return how many tokens of a row the next token will see besides itself; transformers would keep as many."""
        return self.real_tokens(row) - self.hidden(row)

    def expected_length(self) -> int:
        """Return the number of tokens per row to allocate buffers for.

        This is ``max_length``, or :attr:`seen` if that is more. With a sliding window, it is at most
        :func:`kvbench.cache.sliding.room`.
        """
        expected = max(self.progress.max_length or 0, self.seen)
        return expected if self.window is None else min(expected, sliding.room(self.window))

    def coming(self) -> int:
        """Return how many more tokens a row may get before it has ``max_length``; 0 if ``max_length`` is unknown."""
        return max((self.progress.max_length or 0) - self.seen, 0)

    def new_empty(self) -> Tensor:
        """Return a tensor of size 0 that carries the layer's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def chain(self) -> list[KVLayer]:
        """Return the layers that get this prompt: this one and its :attr:`follower`, if it has one."""
        return [self] if self.follower is None else [self, self.follower]

    # -- basis ------------------------------------------------------------------------------------------------------

    def transform(self, side: Side) -> Transform | None:
        """Return the basis in which the layer stores its keys or its values (``Method.transform``); None: the model's.

        Under tensor parallelism, a process gets the matrices of its own KV heads.

        Raises:
            ConfigError: the basis has a matrix per KV head, for another number of heads.
        """
        basis, (rank, ranks) = self.method.transform(self, side), self.progress.rank
        if basis is None or basis.heads in (None, 1):
            return basis
        if basis.heads != ranks * self.heads:
            raise ConfigError(
                f"method.rotation.{side}",
                None,
                f"the file has matrices for {basis.heads} KV heads, but layer {self.index} has {ranks * self.heads}",
                hint="calibrate for this model",
            )
        return basis if ranks == 1 else basis.of_heads(rank * self.heads, self.heads)

    def transforms(self) -> tuple[Transform | None, Transform | None]:
        """Return the bases of the keys and of the values (:meth:`transform`)."""
        return self.transform("key"), self.transform("value")

    def rotated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys ``[B, H, n, D]`` and values ``[B, H, n, Dv]`` in the basis in which the layer stores them."""
        key, value = self.transforms()
        return keys if key is None else key.keys(keys), values if value is None else value.values(values)

    def unrotated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored keys ``[B, H, n, D]`` and values in the basis of the model; undoes :meth:`rotated`."""
        key, value = self.transforms()
        return keys if key is None else key.back(keys), values if value is None else value.back(values)

    def rotated_queries(self, query: Tensor) -> Tensor:
        """Return queries ``[B, Hq, q, D]`` in the basis in which the layer stores its keys.

        Where an engine rounds queries and nothing else (:meth:`Policy.arithmetic`), they are rounded too.
        """
        transform, rounding = self.transform("key"), self.method.arithmetic(self, query.shape[2])
        query = query if transform is None else transform.queries(query)
        return query if rounding is None or not rounding.by_query else rounding.rounded(query).to(query.dtype)

    def rounding(self, count: int) -> Arithmetic | None:
        """Return the rounding that the attention of `count` queries has beyond that of the queries; None if none."""
        rounding = self.method.arithmetic(self, count)
        return None if rounding is None or rounding.by_query else rounding

    def restored(self, output: Tensor) -> Tensor:
        """Return the output of attention over stored values, ``[B, q, Hq, Dv]``, in the basis of the model."""
        transform = self.transform("value")
        return output if transform is None else transform.back(output.transpose(1, 2)).transpose(1, 2)

    # -- copies -----------------------------------------------------------------------------------------------------

    def clone(self, progress: Progress) -> KVLayer:
        """Return an independent copy of the layer for a cache whose layers share `progress`."""
        twin = copy(self)
        twin.progress, twin.order, twin.firm = progress, list(self.order), list(self.firm)
        twin.paths, twin.pairs, twin.described = set(self.paths), set(self.pairs), None
        twin.keys_store = self.keys_store and self.keys_store.clone()
        twin.values_store = self.values_store and self.values_store.clone()
        if self.prompt is not None:
            twin.prompt = (self.prompt[0].clone(), self.prompt[1].clone())
        if twin.keys_store is not None:
            twin.join_cache()
        return twin
