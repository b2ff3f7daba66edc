"""A layer during prefill: tokens stay in full precision until the prompt is complete, then go to the stores."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache import rope
from kvbench.cache.nonfinite import located, watch_segments
from kvbench.cache.rollback import Rollback
from kvbench.cache.segments.base import FullSegment, uniform_rows
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.errors import NonFiniteError

ALL = slice(None)


class PromptPhase(Rollback):
    """The prefill part of a layer of the cache: it collects the prompt, then has the method store it.

    Keys are ``[B, H, n, D]`` and values ``[B, H, n, Dv]`` for n tokens, padding included.
    """

    def initialize(self, keys: Tensor, values: Tensor) -> None:
        """Take the layer's sizes and device from the first keys and values, and its dtype too if none was set."""
        self.batch, self.heads = keys.shape[:2]
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
            self.follower.place(rope.handed_on(self, ALL, keys, 0), values)
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
                segment.packs = self.progress.packs
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
            begin = max(starts[rows][0] - first, 0)
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
