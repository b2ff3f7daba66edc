"""Interface of segments: runs of tokens that share a storage format, for every row of a batch and every KV head.

A store (:mod:`kvbench.cache.store`) is a list of segments. Buffers are allocated in advance and grow by copying, at
amortised constant cost per token. Quantized tokens are never dequantized to be quantized again (except in
:mod:`kvbench.cache.segments.foreign`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

#: number of tokens that :meth:`Segment.append_chosen` gathers at a time; bounds the temporary copy
GATHERED = 8192


class Segment(ABC):
    """A run of tokens in one storage format, for all rows of a batch and all KV heads.

    Rows may hold different numbers of tokens, but all rows that one call works on (a slice of the batch) must hold the
    same number; :func:`~kvbench.cache.segments.base.uniform_rows` divides a batch accordingly. Indices of tokens
    (`start`, `stop`) count from the first token of the segment; `stop` is exclusive.

    Args:
        batch: number of rows, B.
        heads: number of KV heads, H.
        channels: channels per head, D.
        dtype: dtype of the model's keys and values.
    """

    #: True if tokens are held as codes, False if in full precision
    packed: bool

    def __init__(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.heads, self.channels, self.dtype, self.device = heads, channels, dtype, torch.device(device)
        self.lengths = [0] * batch
        #: work on the tokens that torch did because no kernel takes them, each with the reason
        self.by_torch: set[str] = set()

    def length(self, rows: slice) -> int:
        """Return the number of tokens of each row, which must be the same for all of `rows`."""
        return self.lengths[rows][0]

    @abstractmethod
    def append(self, rows: slice, x: Tensor) -> None:
        """Append tokens in full precision, ``[rows, H, n, D]``, to some rows, in the format of the segment."""

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """Append some of the tokens ``x`` ``[rows, H, T, D]`` to some rows, in the format of the segment.

        `index` holds their indices along T in the order in which to append them, ``[n]``, on the device of `x`.
        """
        for first in range(0, len(index), GATHERED):
            self.append(rows, x.index_select(2, index[first : first + GATHERED]))

    @abstractmethod
    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return consecutive tokens, ``[rows, H, stop - start, D]``, decoded to elements of the given dtype."""

    def read_upper(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return consecutive tokens at the lower precision that QuantSpec's draft reads.

        That is, 8-bit codes whose halves can be decoded apart (hierarchical codes) are decoded from their upper 4 bits.
        In all other formats, the result is that of :meth:`read`.
        """
        return self.read(rows, start, stop, dtype)

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest tokens of one row (rollback).

        Raises:
            TypeError: tokens of this format cannot be dropped from the end.
        """
        raise TypeError(f"tokens cannot be removed from a {type(self).__name__}")

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest tokens of some rows, such as those that have left a sliding window.

        Raises:
            TypeError: tokens of this format cannot be dropped from the front.
        """
        raise TypeError(f"tokens cannot be removed from a {type(self).__name__}")

    @abstractmethod
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return all buffers of the segment as pairs (category, buffer).

        The category is the field of :class:`~kvbench.cache.bill.Parts` under which the bill counts the bytes:
        ``codes``, ``scales``, ``window`` (tokens or elements in full precision) or ``index``.
        """

    @abstractmethod
    def used(self, row: int) -> dict[str, int]:
        """Return how many bytes the tokens of one row take, by category (:meth:`buffers`). Free room does not count."""

    @abstractmethod
    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer by ``change(buffer)``. Dimension 0 of a buffer is the batch."""

    def select(self, index: Tensor) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        `index` gives the old row of each row of the new batch, ``[new batch]``.
        """
        self.lengths = [self.lengths[i] for i in index.tolist()]
        with torch.inference_mode(False), torch.no_grad():
            self.map_buffers(lambda buffer: buffer.index_select(0, index.to(buffer.device).clone()))

    def clone(self) -> Segment:
        """Return an independent copy of the segment, with its own buffers."""
        twin = copy(self)
        twin.lengths, twin.by_torch = list(self.lengths), set(self.by_torch)
        with torch.inference_mode(False), torch.no_grad():
            twin.map_buffers(torch.clone)
        return twin
