"""The tokens that one layer of a cache holds, and views of them."""

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
    """State of one layer; :class:`kvbench.cache.layer.KVLayer` adds the phases of its life.

    Args:
        method: decides formats and moves (:class:`kvbench.methods.base.Method`).
        index: number of the layer.
        progress: state that the layers of a cache share.
        window: tokens that a query of the layer sees, itself included (a sliding window); None: all.

    Attributes:
        batch, heads, key_dim, value_dim, dtype, device: of the keys and values, known from the first ones on.
        sealed: True once the prompt is placed.
        seen: tokens seen, padding included.
        prompt: keys and values of an open prompt that comes in chunks.
        keys_store, values_store: :class:`Store`, made when the prompt is placed.
        order: for each row None (slots are in the order of positions) or the positions of its slots, ``[n]`` or
            ``[H, n]``, on the CPU, without the newest ones, which are in order (:meth:`ordered`); a method that
            permutes or evicts tokens maintains it.
        firm: for each row the column from which on tokens may be taken back: earlier tokens have moved since (were
            packed, thinned out, evicted), and would not be what they are had they never come.
        paths: attention paths that have served this layer.
        pairs: (key segment, value segment) of the phases that kernels have met (:mod:`kvbench.attention.phases`).
        observed: attention of an open prompt that the method asked for (``Method.observe_prompt``).
        follower: the same layer of a draft's own cache, which gets the same prompt; or None.
        rotation: the model's RoPE (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`) where keys are stored before
            it, else None.
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
        self.pairs: set[tuple[int, int]] = set()
        self.observed: Tensor | None = None

    # -- stores -----------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[Store, Store]:
        """Return keys and values, once the prompt is placed.

        Raises:
            CacheError: it is not.
        """
        if self.keys_store is None or self.values_store is None:
            raise CacheError(f"layer {self.index} has no stores yet: the prompt was not finished (cache.finalize())")
        return self.keys_store, self.values_store

    def segments(self) -> list[Segment]:
        """Return the segments of both stores, or those of the open prompt."""
        if self.keys_store is not None and self.values_store is not None:
            return [*self.keys_store.segments, *self.values_store.segments]
        return list(self.prompt or ())

    def rolling(self) -> list[RollingSegment]:
        """Return the segments if each side has a single one that rolls; else none."""
        if self.keys_store is None:
            return []
        segments = self.segments()
        windows = [segment for segment in segments if isinstance(segment, RollingSegment)]
        return windows if len(windows) == len(segments) else []

    def length(self, rows: slice) -> int:
        """Return the number of slots of `rows`, which agree."""
        return self.stores()[0].length(rows)

    def row_groups(self) -> list[slice]:
        """Return runs of rows that agree in all lengths and places of their segments and in their first column.

        Places differ where windows of equally long rows have moved at different steps: after rounds of speculation.
        """
        segments = self.segments()
        counts = [self.progress.padding.starts or [0] * self.batch, *(segment.lengths for segment in segments)]
        counts += [segment.starts for segment in segments if isinstance(segment, FullSegment)]
        if all(same(count) for count in counts):
            return [slice(0, self.batch)]
        return list(uniform_rows(list(zip(*counts, strict=True))))

    # -- positions --------------------------------------------------------------------------------------------------

    def ordered(self, row: int) -> Tensor | None:
        """Return the positions of a row's slots: those in :attr:`order`, then the newest; None: they are in order."""
        order = self.order[row]
        if order is None:
            return None
        missing = sum(self.stores()[0].signature(row)) - order.shape[-1]
        if missing > 0:
            new = torch.arange(self.seen - missing, self.seen).expand(*order.shape[:-1], missing)
            order = self.order[row] = extended(order, new)
        return order

    def positions(self, row: int) -> Tensor:
        """Return the columns of the padded batch that a row's slots hold, ``[n]`` or ``[H, n]``, on the CPU."""
        order = self.method.positions(self, row)
        if order is not None:
            return order
        return torch.arange(self.first(row), self.seen)

    def hidden_slots(self, row: int, hidden: int) -> int:
        """Return how many slots at the front of a row hold only tokens among the oldest `hidden`, in every head."""
        positions = self.positions(row)
        if positions.ndim > 1:
            positions = positions.amax(0)
        return int((positions < self.start(row) + hidden).to(torch.uint8).cumprod(0).sum())

    def start(self, row: int) -> int:
        """Return the column of a row's first real token: its left padding."""
        starts = self.progress.padding.starts
        return starts[row] if starts else 0

    def first(self, row: int) -> int:
        """Return the column of a row's first slot, where slots are in order without a gap.

        It is later than :meth:`start` where a sliding window has passed some tokens.
        """
        return self.seen - sum(self.stores()[0].signature(row))

    # -- counts -----------------------------------------------------------------------------------------------------

    def real_tokens(self, row: int) -> int:
        """Return the tokens of a row that were seen, without padding."""
        return self.seen - self.start(row)

    def hidden(self, row: int) -> int:
        """Return how many of a row's oldest tokens no later token sees: a sliding window has passed them."""
        return 0 if self.window is None else max(self.real_tokens(row) - (self.window - 1), 0)

    def visible_tokens(self, row: int) -> int:
        """Return the tokens of a row that the next one will see: what stock transformers holds of it."""
        return self.real_tokens(row) - self.hidden(row)

    def expected_length(self) -> int:
        """Return the tokens to allocate for: ``max_length`` or those seen so far; at most what a window shows."""
        expected = max(self.progress.max_length or 0, self.seen)
        return expected if self.window is None else min(expected, sliding.room(self.window))

    def coming(self) -> int:
        """Return the tokens that are still to come, as far as ``max_length`` says."""
        return max((self.progress.max_length or 0) - self.seen, 0)

    def new_empty(self) -> Tensor:
        """Return an empty tensor of the layer's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def chain(self) -> list[Self]:
        """Return the layer, and the one that follows it."""
        return [self] if self.follower is None else [self, self.follower]
