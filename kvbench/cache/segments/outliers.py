"""Outliers: elements of quantized tokens that stay in full precision, each as a value and a 16-bit index.

An index is relative to a block of tokens (:func:`block_of`): ``token within the block * C + channel``, over all C =
heads * head_dim channels. The entries of a row are sorted by block, then by head, by token and by channel, and a table
in device memory holds the end of each run of entries of one block and head. So a kernel finds the outliers of one head
without reading those of the others, and a captured step can add a token without the host.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import pairwise

import torch
from torch import Tensor

from kvbench.cache.segments.layout import TILE, to_int16
from kvbench.errors import ConfigError

#: number of elements that a 16-bit index can distinguish
INDICES = 1 << 16


def block_of(width: int) -> int:
    """Return how many consecutive tokens form a block: the largest number whose elements 16 bits can distinguish.

    The number is rounded down to a power of two (16 for a `width` of 4096 channels over all heads), and is at most 128,
    so that each tile of 128 tokens consists of whole blocks.
    """
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)


class Outliers:
    """The outliers of a segment of quantized tokens, each stored as an entry: its value and its index within its block.

    Args:
        batch: number of rows.
        width: number of channels of a token over all heads, C.
        dtype: dtype of the values.
        capacity: number of entries per row to allocate for; the buffers grow if it is exceeded.
        heads: number of heads among which the channels are divided.
        tokens: number of tokens per row for whose blocks to allocate; the table grows if it is exceeded.

    Attributes:
        lengths: number of tokens of each row.
        table: where the entries of each block and head end: the number of entries of the row in this run and in all
            runs before it, int32 ``[B, blocks, heads]``. Only the blocks that hold tokens are defined.

    Raises:
        ConfigError: a token has more channels than 16 bits can index.
    """

    def __init__(
        self,
        batch: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 0,
        *,
        heads: int = 1,
        tokens: int = 0,
    ) -> None:
        if width > INDICES:
            raise ConfigError(
                "method.outliers",
                None,
                f"a token has {width} channels over all KV heads, but 16-bit indices allow at most {INDICES}",
                hint="method.outliers=0",
            )
        self.width, self.block, self.heads = width, block_of(width), heads
        self.lengths = [0] * batch
        #: for each row, a number of entries that it does not exceed; the device alone knows how many a kernel has added
        self.most = [0] * batch
        with torch.inference_mode(False):
            self.values = torch.empty(batch, capacity, dtype=dtype, device=device)
            self.indices = torch.empty(batch, capacity, dtype=torch.int16, device=device)
            self.table = torch.zeros(batch, -(-tokens // self.block), heads, dtype=torch.int32, device=device)

    @property
    def ends(self) -> list[list[int]]:
        """For each row, where the entries of each block end; reading it waits for the device."""
        return [self.table[row, : self._blocks(n), -1].tolist() for row, n in enumerate(self.lengths)]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def count(self, row: int) -> int:
        """Return the number of outliers of a row; the host waits for the device."""
        return self._end(row, self._blocks(self.lengths[row]))

    def _end(self, row: int, blocks: int) -> int:
        """Return the number of entries in the first `blocks` blocks of a row."""
        return int(self.table[row, blocks - 1, -1]) if blocks else 0

    def append(self, rows: slice, start: int, x: Tensor, mask: Tensor) -> None:
        """Append the outliers of new tokens to some rows.

        Args:
            start: index of the first new token within the segment.
            x: elements of the new tokens in full precision, ``[rows, n, C]``.
            mask: True for outliers, ``[rows, n, C]``.
        """
        count = mask.shape[1]
        if not count:
            return
        first, last = start // self.block, self._blocks(start + count)
        self.reserve(last)
        _, token, channel = mask.nonzero(as_tuple=True)
        token = token + start
        values = x[mask].to(self.values.dtype)
        indices = token % self.block * self.width + channel
        runs = (token // self.block - first) * self.heads + channel // (self.width // self.heads)
        totals = mask.sum((1, 2)).tolist()
        done = 0
        for at, row in enumerate(range(*rows.indices(len(self.lengths)))):
            part = slice(done, done + totals[at])
            done += totals[at]
            # the tokens before these in the first block: their entries are sorted together with the new ones
            base = self._end(row, first)
            open_end = self._end(row, first + 1) if start % self.block else base
            old = self.indices[row, base:open_end].to(torch.int64) & (INDICES - 1)
            old_runs = old % self.width // (self.width // self.heads)
            index = torch.cat([old, indices[part]])
            run = torch.cat([old_runs, runs[part]])
            value = torch.cat([self.values[row, base:open_end], values[part]])
            # by run, that is by block and head, then by index, that is by token and channel
            order = (run * INDICES + index).argsort()
            total = base + len(order)
            if total > self.values.shape[1]:
                self._grow(total)
            self.values[row, base:total] = value[order]
            self.indices[row, base:total] = to_int16(index[order].to(torch.int32))
            ends = torch.bincount(run, minlength=(last - first) * self.heads).cumsum(0) + base
            self.table[row, first:last] = ends.view(last - first, self.heads).to(torch.int32)
            self.lengths[row], self.most[row] = start + count, total

    def advance(self) -> None:
        """Make room for the outliers of one new token of every row, which a kernel will append.

        All its elements may be outliers. The host waits for the device only if there might be no room for them.
        """
        for row, most in enumerate(self.most):
            if most + self.width > self.values.shape[1]:
                self.most[row] = self.count(row)
                if self.most[row] + self.width > self.values.shape[1]:
                    self._grow(self.most[row] + 64 * self.width)
        for row in range(len(self.lengths)):
            self.most[row] += self.width
            self.lengths[row] += 1
        self.reserve(self._blocks(max(self.lengths, default=0)))

    def reserve(self, blocks: int) -> None:
        """Make room in the table for a number of blocks per row."""
        if blocks <= self.table.shape[1]:
            return
        with torch.inference_mode(False):
            old = self.table
            self.table = old.new_zeros(len(old), blocks + blocks // 2, self.heads)
            self.table[:, : old.shape[1]] = old

    def _grow(self, needed: int) -> None:
        room = needed + needed // 2
        with torch.inference_mode(False):
            for name in ("values", "indices"):
                old = getattr(self, name)
                new = torch.empty(len(old), room, dtype=old.dtype, device=old.device)
                new[:, : old.shape[1]] = old
                setattr(self, name, new)

    def write_into(self, out: Tensor, row: int, first: int) -> None:
        """Put the outliers of one row back into its dequantized tokens, in place.

        Args:
            out: dequantized tokens ``[H, n, D]``, beginning with a block. They must end with a block or with the row's
                last token.
            first: index of the block with which `out` begins.
        """
        channels = out.shape[-1]
        last = min(first + self._blocks(out.shape[1]), self._blocks(self.lengths[row]))
        if last <= first:
            return
        ends = [self._end(row, first), *self.table[row, first:last, -1].tolist()]
        if ends[-1] == ends[0]:
            return
        sizes = [b - a for a, b in pairwise(ends)]
        base = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * self.block
        index = self.indices[row, ends[0] : ends[-1]].to(torch.int64) & (INDICES - 1)
        token = index // self.width + base.to(index.device, non_blocking=True)
        channel = index % self.width
        out[channel // channels, token, channel % channels] = self.values[row, ends[0] : ends[-1]].to(out.dtype)

    def keep_first(self, row: int, tokens: int) -> None:
        """Drop the outliers of a row's newest tokens (rollback); those of its `tokens` oldest ones stay."""
        if tokens >= self.lengths[row]:
            return
        self.lengths[row] = tokens
        block, part = divmod(tokens, self.block)
        # only whole blocks are left: nothing reads the table, or the entries, behind the last of them
        if not part:
            return
        low, high = self._end(row, block), self._end(row, block + 1)
        index = self.indices[row, low:high].to(torch.int64) & (INDICES - 1)
        stays = index < part * self.width
        index, value = index[stays], self.values[row, low:high][stays]
        self.values[row, low : low + len(index)] = value
        self.indices[row, low : low + len(index)] = to_int16(index.to(torch.int32))
        head = index % self.width // (self.width // self.heads)
        ends = torch.bincount(head, minlength=self.heads).cumsum(0) + low
        self.table[row, block] = ends.to(torch.int32)

    def drop_first(self, row: int, blocks: int) -> None:
        """Drop the outliers of a row's oldest blocks of tokens, and move the others to the front of the buffers."""
        there = self._blocks(self.lengths[row])
        blocks = min(blocks, there)
        low, total = self._end(row, blocks), self._end(row, there)
        self.most[row] = total - low
        for buffer in (self.values, self.indices):
            buffer[row, : total - low] = buffer[row, low:total].clone()
        self.table[row, : there - blocks] = self.table[row, blocks:there].clone() - low
        self.lengths[row] = max(self.lengths[row] - blocks * self.block, 0)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Outliers:
        """Return a copy in which each buffer (values, indices, table) is replaced by ``change(buffer)``."""
        twin = copy(self)
        twin.values, twin.indices, twin.table = change(self.values), change(self.indices), change(self.table)
        twin.lengths, twin.most = list(self.lengths), list(self.most)
        return twin

    def select(self, order: list[int]) -> None:
        """Reorder :attr:`lengths`, after the caller has reordered the rows of the buffers by :meth:`mapped`.

        `order` gives the old row of each row of the new batch.
        """
        self.lengths, self.most = [self.lengths[i] for i in order], [self.most[i] for i in order]

    def used(self, row: int) -> tuple[int, int]:
        """Return how many bytes the values and how many the indices of one row's outliers need."""
        count = self.count(row)
        return count * self.values.element_size(), count * self.indices.element_size()
