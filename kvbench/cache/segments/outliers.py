"""Outliers: elements of quantized tokens that stay in full precision, each as a value and a 16-bit index.

An index is relative to a block of tokens: ``token within the block * C + channel``, over all C = heads * head_dim
channels. A block has as many tokens as 16 bits can index, rounded down to a power of two (16 for C = 4096). The host
keeps the end of each block's entries, so the entries of adjacent blocks can be read in one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.cache.segments.layout import TILE, to_int16
from kvbench.errors import ConfigError

#: number of elements that a 16-bit index can distinguish
INDICES = 1 << 16


def block_of(width: int) -> int:
    """Return how many consecutive tokens form a block: the largest number whose elements 16 bits can distinguish.

    The number is rounded down to a power of two, and is at most 128, so that each tile of 128 tokens consists of whole
    blocks.

    Args:
        width: number of channels of a token, over all heads.
    """
    return min(1 << ((INDICES // width).bit_length() - 1), TILE)


class Outliers:
    """The outliers of a segment of quantized tokens, that is, the elements that stay in full precision.

    Each outlier is stored as an entry: its value, and a 16-bit index that gives its place among the elements of its
    block of tokens (:func:`block_of`). The entries of a row are sorted by block.

    Args:
        batch: number of rows.
        width: number of channels of a token over all heads, C.
        dtype: dtype of the values.
        device: device of the entries.
        capacity: number of entries per row to allocate for; the buffers grow if it is exceeded.

    Attributes:
        ends: for each row, where the entries of each block end: the number of entries in this block and all before it.

    Raises:
        ConfigError: a token has more channels than 16 bits can index.
    """

    def __init__(self, batch: int, width: int, dtype: torch.dtype, device: torch.device, capacity: int = 0) -> None:
        if width > INDICES:
            raise ConfigError(
                "method.outliers",
                None,
                f"a token has {width} channels over all KV heads, but 16-bit indices allow at most {INDICES}",
                hint="method.outliers=0",
            )
        self.width, self.block = width, block_of(width)
        self.ends: list[list[int]] = [[] for _ in range(batch)]
        with torch.inference_mode(False):
            self.values = torch.empty(batch, capacity, dtype=dtype, device=device)
            self.indices = torch.empty(batch, capacity, dtype=torch.int16, device=device)

    def count(self, row: int) -> int:
        """Return the number of outliers of a row."""
        return self.ends[row][-1] if self.ends[row] else 0

    def append(self, rows: slice, start: int, x: Tensor, mask: Tensor) -> None:
        """Append the outliers of new tokens to some rows.

        Args:
            rows: rows of the batch.
            start: index of the first new token within the segment.
            x: elements of the new tokens in full precision, ``[rows, n, C]``.
            mask: True for outliers, ``[rows, n, C]``.
        """
        if not mask.shape[1]:
            return
        number, token, channel = mask.nonzero(as_tuple=True)
        first = start // self.block
        blocks = (start + mask.shape[1] - 1) // self.block - first + 1
        token = token + start
        order = number * blocks + token // self.block - first  # ascending, as nonzero sorts by row, token, channel
        counts = torch.bincount(order, minlength=len(mask) * blocks).view(len(mask), blocks).tolist()
        indices = to_int16((token % self.block * self.width + channel).to(torch.int32))
        values = x[mask].to(self.values.dtype)
        done = 0
        for row, new in zip(range(*rows.indices(len(self.ends))), counts, strict=True):
            before, total = self.count(row), sum(new)
            if before + total > self.values.shape[1]:
                self._grow(before + total)
            self.values[row, before : before + total] = values[done : done + total]
            self.indices[row, before : before + total] = indices[done : done + total]
            done += total
            ends = self.ends[row]
            base = ends[first - 1] if first else 0
            begun = ends[first] - base if len(ends) > first else 0
            ends[first:] = [base + begun + so_far for so_far in accumulate(new)]

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
            row: row of the batch.
            first: index of the block with which `out` begins.
        """
        ends, channels = self.ends[row], out.shape[-1]
        last = min(first + -(-out.shape[1] // self.block), len(ends))
        low = ends[first - 1] if first else 0
        if last <= first or ends[last - 1] == low:
            return
        sizes = [b - a for a, b in zip([low, *ends[first : last - 1]], ends[first:last], strict=True)]
        base = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * self.block
        index = self.indices[row, low : ends[last - 1]].to(torch.int64) & (INDICES - 1)
        token = index // self.width + base.to(index.device, non_blocking=True)
        channel = index % self.width
        out[channel // channels, token, channel % channels] = self.values[row, low : ends[last - 1]].to(out.dtype)

    def keep_first(self, row: int, tokens: int) -> None:
        """Drop the outliers of a row's newest tokens (rollback).

        Args:
            row: row of the batch.
            tokens: number of the row's oldest tokens whose outliers stay.
        """
        ends = self.ends[row]
        whole, part = divmod(tokens, self.block)
        if whole >= len(ends):
            return
        low = ends[whole - 1] if whole else 0
        entries = 0
        if part:
            index = self.indices[row, low : ends[whole]].to(torch.int64) & (INDICES - 1)
            entries = int((index < part * self.width).sum())
        self.ends[row] = [*ends[:whole], *([low + entries] if part else [])]

    def drop_first(self, row: int, blocks: int) -> None:
        """Drop the outliers of a row's oldest blocks of tokens, and move the others to the front of the buffers.

        Args:
            row: row of the batch.
            blocks: number of blocks to drop.
        """
        ends = self.ends[row]
        low, total = ends[min(blocks, len(ends)) - 1] if ends and blocks else 0, self.count(row)
        for buffer in (self.values, self.indices):
            buffer[row, : total - low] = buffer[row, low:total].clone()
        self.ends[row] = [end - low for end in ends[blocks:]]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Outliers:
        """Return a copy whose two buffers (values and indices) are transformed.

        Args:
            change: function that returns the new buffer for an old one. Dimension 0 of a buffer is the batch.
        """
        twin = copy(self)
        twin.values, twin.indices = change(self.values), change(self.indices)
        twin.ends = [list(ends) for ends in self.ends]
        return twin

    def select(self, order: list[int]) -> None:
        """Reorder the rows of :attr:`ends` after :meth:`mapped` has reordered those of the buffers.

        Args:
            order: for each row of the new batch, the index of its row in the old batch.
        """
        self.ends = [list(self.ends[i]) for i in order]

    def used(self, row: int) -> tuple[int, int]:
        """Return how many bytes the outliers of one row need.

        Args:
            row: row of the batch.

        Returns:
            The bytes of their values, and the bytes of their indices.
        """
        count = self.count(row)
        return count * self.values.element_size(), count * self.indices.element_size()
