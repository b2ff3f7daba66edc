"""One layer of a kvbench cache, as transformers sees it.

A layer passes through two phases. While the prompt is *open* its keys and values stay exact, and attention runs on
them as stock transformers would. At the end of the prompt the method *places* them in the stores; from then on new
tokens are appended in full precision and the method *settles* the layer (demotes what has grown too old) before the
next ones arrive. Settling at that late moment leaves the newest tokens exact until they are confirmed, so that rejected
draft tokens can be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache import rope, sliding, watch
from kvbench.cache.nonfinite import located, located_in_tails
from kvbench.cache.order import extended
from kvbench.cache.progress import Progress
from kvbench.cache.segments.base import FullSegment, same, uniform_rows
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.store import Store
from kvbench.errors import CacheError, NonFiniteError

if TYPE_CHECKING:
    from kvbench.cache.policy import Policy

ALL = slice(None)


class Handle:
    """Stands in for the tensors that ``update`` returns; only kvbench's attention can read it."""

    def __init__(self, layer: KVLayer, fresh: tuple[Tensor, Tensor]) -> None:
        self.layer = layer
        self._fresh: tuple[Tensor, Tensor] | None = fresh

    def claim(self) -> tuple[Tensor, Tensor]:
        """The new keys and values ``[B, H, q, D]``, once: the handle lets go of them."""
        if self._fresh is None:
            raise CacheError("the keys and values of this step were already taken: attention ran twice on one update")
        fresh, self._fresh = self._fresh, None
        return fresh

    def __getattr__(self, name: str) -> Any:
        raise CacheError(
            f"a kvbench cache was read as a tensor ('.{name}'): the model does not run kvbench's attention. "
            "Make the cache with method.new_cache(model), which switches the model to it, and do not change "
            "attn_implementation afterwards"
        )


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Args:
        method: decides formats and moves (:class:`kvbench.methods.base.Method`).
        index: number of the layer.
        progress: what the layers of a cache share about the prompt.
        window: tokens that a query of the layer sees, itself included (a sliding window); None: all.

    Attributes:
        keys_store, values_store: :class:`Store`, made at the first update.
        order: for each row None (slots are in the order of positions) or the positions of its slots, ``[n]`` or
            ``[H, n]``, on the CPU, without the newest ones, which are in order (:meth:`ordered`); a method that
            permutes or evicts tokens keeps it.
        paths: attention paths that have served this layer.
        observed: attention that the method asked to see while the prompt is open (``Method.observe_prompt``).
        follower: the same layer of a draft's own cache, which is handed the same prompt; or None.
        rotation: the model's RoPE (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`) where keys are stored before
            it, else None.
        firm: for each row the column from which on tokens may be taken back: what came before them has moved since
            (was packed, thinned out, evicted), and would not be what it is had they never come.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, method: Policy, index: int, progress: Progress, window: int | None = None) -> None:
        super().__init__()
        self.method, self.index, self.progress, self.window = method, index, progress, window
        self.follower: KVLayer | None = None
        self.rotation: Callable[..., Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self.sealed = False
        self.seen = 0
        self.prompt: tuple[FullSegment, FullSegment] | None = None
        self.keys_store: Store | None = None
        self.values_store: Store | None = None
        self.order: list[Tensor | None] = []
        self.firm: list[int] = []
        self.paths: set[str] = set()
        self.observed: Tensor | None = None
        self.__dict__.pop("pairs", None)  # phases that kernels have met (kvbench.attention.phases)

    # -- what transformers asks -------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device from the first keys and values ``[B, H, q, D]``."""
        self.batch, self.heads = key_states.shape[:2]
        if self.progress.group is not None:
            self.batch = self.progress.group[1]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_dim, self.value_dim = key_states.shape[-1], value_states.shape[-1]
        self.order, self.firm = [None] * self.batch, [0] * self.batch
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the new keys and values ``[B, H, q, D]`` (after RoPE); attention receives the handle returned."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.sealed and not self.progress.held:
            if self.index == 0:
                watch.poll(self.progress)
            self.settle()
        handle = Handle(self, (key_states, value_states))
        self.seen += key_states.shape[2]
        return handle, handle

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: the next token's position."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made in logical coordinates: every position seen, from 0."""
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: ``crop(-k)`` removes k; ``crop(n)`` keeps n (transformers 5.17).

        Raises:
            CacheError: something has moved since one of them came.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers may pass a tensor
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.seen - tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return
        if self.prompt is not None:
            if self.observed is not None:
                raise CacheError(
                    f"cannot take back {count} tokens of an open prompt whose attention is observed "
                    f"({type(self.method).__name__.lower()}): start the prompt again with a new cache"
                )
            for segment in self.prompt:
                for row in range(self.batch):
                    segment.drop_back(row, min(count, segment.lengths[row]))
        else:
            self.take_back([count] * self.batch)
            return
        self.seen -= count

    def take_back(self, counts: Sequence[int]) -> None:
        """Take back the newest ``counts[row]`` tokens of each row of a placed prompt; see :meth:`KVCache.take_back`.

        Raises:
            CacheError: something has moved since one of them came: a token was packed, thinned out or evicted that
                would still be where it was (``atom`` and ``kvquant`` pack each token by itself and take back any).
        """
        least, stores = min(counts), self.stores()
        for row, count in enumerate(counts):
            available = min(self.seen - self.firm[row], sum(stores[0].signature(row)))
            if self.method.gives_tail and self.window is None:
                available = max(available, min(store.tail.lengths[row] for store in stores))
            if count > available:
                raise CacheError(
                    f"cannot take back {count} tokens: of row {row} of layer {self.index} only the newest {available} "
                    "can go, since the cache has packed or dropped tokens for those before. Roll back before the next "
                    "step and before bill()"
                )
        for row, count in enumerate(counts):
            for store in stores:
                store.drop_back(row, count)
            order = self.order[row]
            if order is not None:  # the row's columns move to the right by what it gave back more than others
                self.order[row] = order[..., : sum(stores[0].signature(row))] + (count - least)
            self.firm[row] += count - least
        self.seen -= least
        self.firm[:] = [min(firm, self.seen) for firm in self.firm]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows ``beam_idx`` become the batch."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Rows `indices` become the batch, repeats allowed."""
        if not self.is_initialized:
            return
        for segment in self._segments():
            segment.select(indices)
        self.order = [self.order[i] for i in indices.tolist()]
        self.firm = [self.firm[i] for i in indices.tolist()]
        self.batch = len(self.order)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a run."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    # -- the prompt -------------------------------------------------------------------------------------------------

    def extend_prompt(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the open prompt so far, the new ones ``[B, H, q, D]`` included, padding and all."""
        if self.prompt is None and self.progress.is_last(self.seen):
            return keys, values
        if self.prompt is None:
            room = max(self.progress.prompt_width or 0, self.seen)
            self.prompt = tuple(  # type: ignore[assignment]
                FullSegment(self.batch, self.heads, x.shape[-1], self.dtype, self.device, capacity=room)
                for x in (keys, values)
            )
        assert self.prompt is not None
        for segment, x in zip(self.prompt, (keys, values), strict=True):
            segment.append(ALL, x)
        return self.prompt[0].view(ALL), self.prompt[1].view(ALL)

    def end_chunk(self, keys: Tensor, values: Tensor) -> None:
        """Attention over the prompt so far is done; place it when it is complete."""
        if self.progress.is_last(self.seen):
            self.place(keys, values)

    def place(self, keys: Tensor, values: Tensor) -> None:
        """The prompt is complete: hand its tokens (``[B, H, T, D]`` with padding) to the method and free them."""
        if self.follower is not None:
            self.follower.progress.group = self.progress.group
            if not self.follower.is_initialized:
                self.follower.lazy_initialization(keys, values)
            self.follower.seen = self.seen
            self.follower.progress.positions = self.progress.positions.clone()
            self.follower.place(rope.handed_on(self, ALL, keys, 0), values)
        scores, self.observed = self.observed, None
        keys, values = keys.detach(), values.detach()
        if self.keys_store is None:
            self._make_stores()
        width = keys.shape[2]
        group = slice(0, self.batch) if self.progress.group is None else self.progress.group[0]
        starts = (self.progress.starts or [0] * self.batch)[group]
        for here in uniform_rows(starts):
            start, rows = starts[here][0], slice(group.start + here.start, group.start + here.stop)
            start += self.method.forgotten(self, self.hidden(rows.start))
            try:
                self.method.place(
                    self,
                    rows,
                    keys[here, :, start:width],
                    values[here, :, start:width],
                    None if scores is None else scores[here, ..., start:width],
                )
            except NonFiniteError as error:
                raise located(self, error, group, keys, values, torch.arange(width)) from None
            self._firm(rows, None)
        self.prompt = None
        self.sealed = group.stop == self.batch

    def _make_stores(self) -> None:
        self.keys_store = self.method.make_store(self, "key")
        self.values_store = self.method.make_store(self, "value")
        watch.attach(self)

    def place_chunk(self, keys: Tensor, values: Tensor) -> None:
        """Hand prompt tokens ``[B, H, q, D]`` to the method as they come (``Method.quantized_prefill``)."""
        keys, values = keys.detach(), values.detach()
        if self.keys_store is None:
            self._make_stores()
        first = self.seen - keys.shape[2]
        starts = self.progress.starts or [0] * self.batch
        for rows in uniform_rows(starts):
            begin = max(starts[rows][0] - first, 0)
            if self.window and self.length(rows):
                self.method.forget(self, rows, max(self.hidden(rows.indices(self.batch)[0]) - keys.shape[2], 0))
            if begin < keys.shape[2]:
                try:
                    self.method.place(self, rows, keys[rows, :, begin:], values[rows, :, begin:], None)
                except NonFiniteError as error:
                    raise located(self, error, rows, keys, values, torch.arange(first, self.seen)) from None
                self._firm(rows, None)
        self.sealed = self.progress.is_last(self.seen)

    def seal(self) -> None:
        """Place an open prompt that is held exactly (end of a chunked prefill)."""
        if not self.sealed and self.prompt is not None:
            self.place(self.prompt[0].view(ALL), self.prompt[1].view(ALL))
        self.sealed = self.keys_store is not None

    # -- decoding ---------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take new tokens ``[B, H, q, D]`` into the full-precision tails."""
        for store, x in zip(self.stores(), (keys, values), strict=True):
            tail = store.tail
            for rows in uniform_rows(list(zip(tail.starts, tail.lengths, strict=True))):
                tail.append(rows, x[rows].detach())

    def advance(self, count: int) -> list[tuple[int, int]]:
        """Hold `count` new tokens that a captured step writes; for each row where its keys and its values go.

        Returns:
            Places in the buffers of the two tails, (keys, values), for each row.
        """
        places = [store.tail.advance(count) for store in self.stores()]
        self.seen += count
        return list(zip(*places, strict=True))

    def ordered(self, row: int) -> Tensor | None:
        """Positions of a row's slots (:attr:`order`): those that it was left with, then the newest tokens; or None."""
        order = self.order[row]
        if order is None:
            return None
        missing = sum(self.stores()[0].signature(row)) - order.shape[-1]
        if missing > 0:
            new = torch.arange(self.seen - missing, self.seen).expand(*order.shape[:-1], missing)
            order = self.order[row] = extended(order, new)
        return order

    def settle(self, *, forget: bool = True) -> None:
        """Let the method demote what has grown too old, and drop what a sliding window has passed.

        Does nothing when it was done already.

        Args:
            forget: False: drop nothing yet, as queries of the newest tokens are still to see it.
        """
        if not self.sealed or not (self.method.settles or self.window):
            return
        for rows in self.row_groups():
            before = self._lengths(rows)
            try:
                self.method.settle(self, rows)
            except NonFiniteError as error:
                raise located_in_tails(self, error, rows) from None
            if self.window and forget:
                self.method.forget(self, rows, self.hidden(rows.indices(self.batch)[0]))
            self._firm(rows, before)

    def _lengths(self, rows: slice) -> list[tuple[int, ...]]:
        row = rows.indices(self.batch)[0]
        return [store.signature(row) for store in self.stores()]

    def _firm(self, rows: slice, before: list[tuple[int, ...]] | None) -> None:
        """Note that tokens of `rows` have moved, if they have: those seen so far cannot be taken back any more.

        Args:
            before: what each segment held before tokens may have moved; None: nothing, a prompt was placed.
        """
        row = rows.indices(self.batch)[0]
        after, seen = self._lengths(rows), self.real_tokens(row)
        held = min(map(sum, after))
        if before is None:
            moved = held < seen or (any(any(lengths[:-1]) for lengths in after) and not self.method.by_token)
        else:
            moved = after != before and not (self.method.by_token and held == min(map(sum, before)))
        if moved or self.method.observe_steps:
            self.firm[rows] = [self.seen] * len(self.firm[rows])

    # -- views ------------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[Store, Store]:
        """Keys and values, once the prompt is placed."""
        if self.keys_store is None or self.values_store is None:
            raise CacheError(f"layer {self.index} has no stores yet: the prompt was not finished (cache.finalize())")
        return self.keys_store, self.values_store

    def length(self, rows: slice) -> int:
        """Slots of `rows`, which agree."""
        return self.stores()[0].length(rows)

    def rolling(self) -> list[RollingSegment]:
        """The segments, where each side has one and it rolls; else none."""
        if self.keys_store is None or self.values_store is None:
            return []
        held = [*self.keys_store.segments, *self.values_store.segments]
        found = [segment for segment in held if isinstance(segment, RollingSegment)]
        return found if len(found) == len(held) else []

    def row_groups(self) -> list[slice]:
        """Runs of rows that hold equally many tokens in every segment, at the same places, and begin at one column.

        Places differ where windows of equally long rows have moved at different steps: after rounds of speculation.
        """
        segments = self._segments()
        held = [self.progress.starts or [0] * self.batch, *(segment.lengths for segment in segments)]
        held += [segment.starts for segment in segments if isinstance(segment, FullSegment)]
        if all(same(each) for each in held):
            return [slice(0, self.batch)]
        return list(uniform_rows(list(zip(*held, strict=True))))

    def positions(self, row: int) -> Tensor:
        """Logical positions (columns of the padded batch) of a row's slots, ``[n]`` or ``[H, n]``, on the CPU."""
        order = self.method.positions(self, row)
        if order is not None:
            return order
        return torch.arange(self.first(row), self.seen)

    def start(self, row: int) -> int:
        """Column of a row's first real token: its left padding."""
        return self.progress.starts[row] if self.progress.starts else 0

    def first(self, row: int) -> int:
        """Column of a row's first slot, where slots are in order without a gap; later than :meth:`start` where a
        sliding window has passed some tokens."""
        return self.seen - sum(self.stores()[0].signature(row))

    def hidden(self, row: int) -> int:
        """Oldest tokens of a row that no later token sees: those that a sliding window has passed."""
        return 0 if self.window is None else max(self.real_tokens(row) - (self.window - 1), 0)

    def visible_tokens(self, row: int) -> int:
        """Tokens of a row that the next one will see, itself left out: what stock transformers holds of it."""
        return self.real_tokens(row) - self.hidden(row)

    def new_empty(self) -> Tensor:
        """An empty tensor of the layer's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def expected_length(self) -> int:
        """Tokens to allocate for: what the cache was told, or what was seen so far; at most what a window shows."""
        expected = max(self.progress.max_length or 0, self.seen)
        return expected if self.window is None else min(expected, sliding.room(self.window))

    def coming(self) -> int:
        """Tokens that are still to come, as far as the cache was told."""
        return max((self.progress.max_length or 0) - self.seen, 0)

    def real_tokens(self, row: int) -> int:
        """Tokens of a row that were seen, padding left out."""
        return self.seen - self.start(row)

    def chain(self) -> list[KVLayer]:
        """The layer, and the one that follows it."""
        return [self] if self.follower is None else [self, self.follower]

    def _segments(self) -> list[Any]:
        if self.keys_store is not None and self.values_store is not None:
            return [*self.keys_store.segments, *self.values_store.segments]
        return list(self.prompt or ())

    def clone(self, progress: Progress) -> KVLayer:
        """An independent copy that belongs to a cache with `progress`."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.progress, twin.order, twin.paths = progress, list(self.order), set(self.paths)
        twin.firm = list(self.firm)
        twin.keys_store = self.keys_store and self.keys_store.clone()
        twin.values_store = self.values_store and self.values_store.clone()
        if self.prompt is not None:
            twin.prompt = (self.prompt[0].clone(), self.prompt[1].clone())
        if "pairs" in twin.__dict__:
            twin.__dict__["pairs"] = set(twin.__dict__["pairs"])
        if twin.keys_store is not None:
            watch.attach(twin)
        return twin
