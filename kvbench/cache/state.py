"""The tokens that one layer of a cache holds, with their positions and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.cache import sliding
from kvbench.cache.order import extended
from kvbench.cache.policy import Policy
from kvbench.cache.progress import Progress
from kvbench.cache.segments.base import FullSegment, Segment, same, uniform_rows
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.store import Store
from kvbench.errors import CacheError


class LayerState:
    """State of one layer; :class:`kvbench.cache.layer.KVLayer` adds prefill, decoding and rollback.

    Args:
        method: the rule that decides in which format each token is held (:class:`kvbench.methods.base.Method`).
        index: number of the layer.
        progress: state that the layers of a cache share.
        window: number of tokens that a query of the layer sees, its own included (a sliding window); None for all.

    Attributes:
        batch, heads, key_dim, value_dim, dtype, device: sizes, dtype and device of the keys and values; set when the
            first tokens arrive.
        sealed: True once the whole prompt is in the stores.
        seen: number of tokens seen, padding included.
        prompt: keys and values of a prompt that comes in chunks, in full precision until it is complete; else None.
        keys_store, values_store: :class:`Store`, made when the first tokens of the prompt are placed.
        order: for each row None if its slots are in the order of positions, otherwise the positions of its slots,
            ``[n]`` or ``[H, n]``, on the CPU. The newest slots, which are always in order, may be missing
            (:meth:`ordered` adds them). A method that permutes or evicts tokens maintains it.
        firm: for each row the first column whose token may be taken back. Since the tokens before it arrived, the cache
            has packed, thinned out or evicted tokens on their account, which cannot be undone.
        paths: names of the attention paths that have served this layer.
        pairs: (key segment, value segment) numbers of the slot ranges that kernels have read
            (:mod:`kvbench.attention.phases`).
        observed: the prompt's attention, if the method asks for it (``Method.observe_prompt``), until it is placed.
        follower: the same layer of a draft model's cache, which is given the same prompt; or None.
        rotation: the model's RoPE (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`) if keys are stored before
            RoPE, else None.
    """

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def __init__(self, method: Policy[Any], index: int, progress: Progress, window: int | None = None) -> None:
        self.method, self.index, self.progress, self.window = method, index, progress, window
        self.follower: Self | None = None
        self.rotation: Callable[..., Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and return to the empty state."""
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

    # -- stores -----------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[Store, Store]:
        """Return the stores of keys and of values.

        Raises:
            CacheError: there are none yet, as the prompt is not complete.
        """
        if self.keys_store is None or self.values_store is None:
            raise CacheError(
                f"layer {self.index} has no stores yet, because its prompt is not complete: call cache.finalize() first"
            )
        return self.keys_store, self.values_store

    def segments(self) -> list[Segment]:
        """Return the segments of both stores, keys first; before there are stores, those of the open prompt."""
        if self.keys_store is not None and self.values_store is not None:
            return [*self.keys_store.segments, *self.values_store.segments]
        return list(self.prompt or ())

    def rolling(self) -> list[RollingSegment]:
        """Return the segments of both stores if all of them are rolling windows, else an empty list."""
        if self.keys_store is None:
            return []
        segments = self.segments()
        windows = [segment for segment in segments if isinstance(segment, RollingSegment)]
        return windows if len(windows) == len(segments) else []

    def length(self, rows: slice) -> int:
        """Return the number of slots of each of `rows`, which must have equally many."""
        return self.stores()[0].length(rows)

    def row_groups(self) -> list[slice]:
        """Cut the batch into runs of rows with equal padding and equal lengths and buffer offsets in every segment.

        Offsets may differ between equally long rows: after speculation, their windows have moved at different steps.
        """
        segments = self.segments()
        counts = [self.progress.padding.starts or [0] * self.batch, *(segment.lengths for segment in segments)]
        counts += [segment.starts for segment in segments if isinstance(segment, FullSegment)]
        if all(same(count) for count in counts):
            return [slice(0, self.batch)]
        return list(uniform_rows(list(zip(*counts, strict=True))))

    # -- positions --------------------------------------------------------------------------------------------------

    def ordered(self, row: int) -> Tensor | None:
        """Return the positions of a row's slots, ``[n]`` or ``[H, n]``; None if the slots are in ascending order.

        Completes :attr:`order` with the newest slots.
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
        """Return the column of the padded batch that each slot of a row holds, ``[n]`` or ``[H, n]``, on the CPU."""
        order = self.method.positions(self, row)
        if order is not None:
            return order
        return torch.arange(self.first(row), self.seen)

    def hidden_slots(self, row: int, hidden: int) -> int:
        """Return how many slots at the front of a row hold, in every head, only tokens among its oldest `hidden`."""
        positions = self.positions(row)
        if positions.ndim > 1:
            positions = positions.amax(0)
        return int((positions < self.start(row) + hidden).to(torch.uint8).cumprod(0).sum())

    def start(self, row: int) -> int:
        """Return the column of a row's first real token, which equals its left padding."""
        starts = self.progress.padding.starts
        return starts[row] if starts else 0

    def first(self, row: int) -> int:
        """Return the column of a row's first slot; only for rows whose slots are in order without a gap.

        It exceeds :meth:`start` if a sliding window has passed some tokens.
        """
        return self.seen - sum(self.stores()[0].signature(row))

    # -- counts -----------------------------------------------------------------------------------------------------

    def real_tokens(self, row: int) -> int:
        """Return the number of tokens of a row seen so far, without padding."""
        return self.seen - self.start(row)

    def hidden(self, row: int) -> int:
        """Return how many of a row's oldest tokens no later token can see; 0 without a sliding window."""
        return 0 if self.window is None else max(self.real_tokens(row) - (self.window - 1), 0)

    def visible_tokens(self, row: int) -> int:
        """Return how many tokens of a row the next token will see; these are the ones that stock transformers holds."""
        return self.real_tokens(row) - self.hidden(row)

    def expected_length(self) -> int:
        """Return the number of tokens to allocate for: ``max_length``, or the tokens seen if there are more.

        With a sliding window it is at most the window and some slack (:func:`kvbench.cache.sliding.room`).
        """
        expected = max(self.progress.max_length or 0, self.seen)
        return expected if self.window is None else min(expected, sliding.room(self.window))

    def coming(self) -> int:
        """Return how many tokens may still come until ``max_length``; 0 if it is unknown."""
        return max((self.progress.max_length or 0) - self.seen, 0)

    def new_empty(self) -> Tensor:
        """Return a tensor without elements, of the layer's dtype and on its device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def chain(self) -> list[Self]:
        """Return the layer, followed by its :attr:`follower` if it has one."""
        return [self] if self.follower is None else [self, self.follower]
