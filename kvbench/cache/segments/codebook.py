"""Tokens in KVQuant's format: packed codes of a non-uniform codebook, and outliers in full precision.

The bytes of a row are counted under four names (:class:`~kvbench.cache.bill.Parts`):

* ``codes``: codes of b bits.
* ``scales``: the codebook. For keys also two fp16 thresholds per channel, which give range and offset; for values one
  range and one offset per token, shared by all heads.
* ``window``: the value of each outlier, in the model's dtype.
* ``index``: a 16-bit index for each outlier (:mod:`kvbench.cache.segments.outliers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.segments.base import Segment, Side, allocate
from kvbench.cache.segments.layout import TILE, TileLayout
from kvbench.cache.segments.outliers import Outliers
from kvbench.cache.segments.packed import ENCODED
from kvbench.cache.watch import Watch
from kvbench.quantizers import nuq
from kvbench.quantizers.affine import FP16_MAX, param_dtype
from kvbench.quantizers.packing import PLANES, join_planes, split_planes


@dataclass(frozen=True)
class NuqFormat:
    """KVQuant's format for the keys or the values of a layer: a non-uniform codebook, and outliers in full precision.

    Args:
        bits: bits of a code: 2, 3 or 4.
        levels: codebook used for encoding, fp32 ``[2**bits]``.
        outliers: fraction of the elements that stay in full precision; 0 for none.
        thresholds: for keys, the upper and the lower threshold of each channel, over all heads, fp16 ``[2, C]``. None
            for values, each token of which is scaled by its own range.
        restored: codebook used for decoding if Q-Norm makes it differ from `levels`, fp32 ``[2**bits]``; else None.
        most: for keys, the largest number of outliers of a token above the upper thresholds, and also the largest
            number below the lower ones; None for no limit.
        heads: with tensor parallelism, the first KV head of this process and how many it has; None if it has all.
        gather: with tensor parallelism, a function that takes this process's channels ``[..., channels]`` and returns
            those of all processes, side by side. It is needed because the range of a value token spans all heads. Else
            None.
    """

    bits: int
    levels: Tensor
    outliers: float = 0.0
    thresholds: Tensor | None = None
    restored: Tensor | None = None
    most: int | None = None
    heads: tuple[int, int] | None = None
    gather: Callable[[Tensor], Tensor] | None = None


def lookup_tables(codebook: Tensor, thresholds: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the tables by which kernels look up codes, from a codebook and the thresholds of keys.

    Their shapes are those of :meth:`kvbench.cache.segments.codebook.NuqSegment.lookup`.

    Args:
        codebook: levels for encoding and, if they differ, for decoding, fp32 ``[B, 1 or 2, 2**bits]``.
        thresholds: upper and lower thresholds of keys, fp16 ``[B, 2, C]``; None for values.

    Returns:
        For keys the levels, ranges, offsets and stand-ins of outliers; for values the levels and the level of outliers.
    """
    with torch.inference_mode(False), torch.no_grad():
        levels = codebook[:, -1].contiguous()
        level = levels.gather(1, codebook[:, 0].abs().argmin(-1, keepdim=True))  # an outlier counts as 0
        if thresholds is None:
            return levels, level[:, 0].contiguous()
        scale, offset = nuq.key_params(thresholds)
        return levels, scale.half(), offset.half(), level * scale + offset


__all__ = ["NuqFormat", "NuqSegment"]


class NuqSegment(Segment):
    """Tokens quantized as in KVQuant. Each is encoded on its own, so any number of the newest can be dropped.

    The first arguments are those of :class:`~kvbench.cache.segments.interface.Segment`.

    Args:
        form: format of the tokens. Each row gets its own copy of the codebook and the thresholds.
        side: ``key`` or ``value``; the memory layout of the codes differs
            (:class:`~kvbench.cache.segments.layout.TileLayout`).
        capacity: number of tokens per row to allocate for; the buffers grow if it is exceeded.
    """

    packed = True

    def __init__(
        self,
        batch: int,
        heads: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        form: NuqFormat,
        side: Side,
        capacity: int = 0,
    ) -> None:
        super().__init__(batch, heads, channels, dtype, device)
        self.bits, self.share, self.most, self.width = form.bits, form.outliers, form.most, heads * channels
        self.layouts = [TileLayout(width, side) for width in PLANES[form.bits]]
        first = form.heads[0] if form.heads else 0
        #: the channels that this process holds, among those of all heads
        self.columns = slice(first * channels, (first + heads) * channels)
        self.gather = form.gather
        #: record in which the kernel notes NaN and Inf, and the tag of this segment; None: not recorded
        self.watch: tuple[Watch, int] | None = None
        self._lookup: tuple[Tensor, tuple[Tensor, ...]] | None = None
        tables = [form.levels] if form.restored is None else [form.levels, form.restored]
        with torch.inference_mode(False):
            self.codebook = torch.stack(tables).float().repeat(batch, 1, 1).to(self.device)
            self.thresholds = None
            if form.thresholds is not None:
                mine = form.thresholds[:, self.columns].half()
                self.thresholds = mine.repeat(batch, 1, 1).to(self.device)
        self.words: list[Tensor] = []
        self.params: list[Tensor] = []
        self._allocate(-(-capacity // TILE))
        self.exact: Outliers | None = None
        if form.outliers:
            room = int(capacity * self.width * form.outliers * 1.125)
            self.exact = Outliers(batch, self.width, dtype, self.device, room, heads=heads, tokens=self.tiles * TILE)

    @property
    def capacity(self) -> int:
        """Number of tokens per row for which the buffers have room."""
        return self.tiles * TILE

    def _allocate(self, tiles: int) -> None:
        """Allocate buffers of `tiles` tiles and copy the contents of the present ones."""
        batch, old_words, old_params, self.tiles = len(self.lengths), self.words, self.params, tiles
        self.words = [
            allocate((batch, self.heads, *layout.shape(tiles, self.channels)), torch.int16, self.device).zero_()
            for layout in self.layouts
        ]
        if self.thresholds is None:
            store = param_dtype(self.dtype)
            self.params = [allocate((batch, tiles * TILE), store, self.device).zero_() for _ in range(2)]
        for target, source in zip(self.words, old_words, strict=False):
            target[:, :, : source.shape[2]].copy_(source)
        for target, source in zip(self.params, old_params, strict=False):
            target[:, : source.shape[1]].copy_(source)

    def append(self, rows: slice, x: Tensor) -> None:
        """Quantize tokens, ``[rows, H, n, D]``, and append them to some rows, outliers included.

        Raises:
            NonFiniteError: a token contains NaN or Inf.
        """
        count, start = x.shape[2], self.lengths[rows][0]
        if start + count > self.capacity:
            needed = -(-(start + count) // TILE)
            self._allocate(needed + (needed // 2 if start else 0))
        for first in range(0, count, ENCODED):
            self._encode(rows, start + first, x[:, :, first : first + ENCODED])
        for row in range(*rows.indices(len(self.lengths))):
            self.lengths[row] = start + count

    def advance(self) -> list[int]:
        """Make room for one new token of every row, which counts as stored at once; a kernel quantizes it later.

        Returns:
            For each row, the index of its new token.
        """
        places = list(self.lengths)
        if max(places, default=0) + 1 > self.capacity:
            self._allocate(self.tiles + self.tiles // 2 + 1)
        if self.exact is not None:
            self.exact.advance()
        self.lengths[:] = [length + 1 for length in places]
        return places

    def _encode(self, rows: slice, start: int, x: Tensor) -> None:
        nuq.check_finite(x)
        exact = x.transpose(1, 2).flatten(2)  # [rows, n, C]
        flat = exact.float()
        stop, outliers = start + flat.shape[1], None
        if self.thresholds is not None:
            thresholds = self.thresholds[rows]
            if self.share:
                outliers = nuq.key_outliers(flat, thresholds, self.most)
            scale, offset = (p.unsqueeze(1) for p in nuq.key_params(thresholds))
        else:
            whole = flat if self.gather is None else self.gather(exact).float()
            if self.share:
                outliers = nuq.value_outliers(whole, self.share)
            params = nuq.value_params(whole, outliers, self.params[0].dtype)
            outliers = outliers if outliers is None or self.gather is None else outliers[..., self.columns]
            for buffer, param in zip(self.params, params, strict=True):
                buffer[rows, start:stop] = param
            scale, offset = (p.float().unsqueeze(-1) for p in params)
        codes = nuq.encode_nuq(flat, scale, offset, self.codebook[rows][0, 0], outliers)
        planes = split_planes(codes.unflatten(2, (self.heads, self.channels)).transpose(1, 2), self.bits)
        for layout, words, plane in zip(self.layouts, self.words, planes, strict=True):
            layout.write(words[rows], start, plane)
        if self.exact is not None and outliers is not None:
            self.exact.append(rows, start, exact, outliers)

    def lookup(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what a kernel needs to look up codes: levels, ranges, offsets, and stand-ins of outliers.

        Returns:
            The levels, fp32 ``[B, 2**bits]``; ranges and offsets, fp16 ``[B, C]`` for keys, ``[B, capacity]`` in the
            dtype in which they are stored for values; and what the code of an outlier stands for, fp32: the dequantized
            element ``[B, C]`` for keys, the level ``[B]`` for values. Their memory stays the same until rows are
            reordered or buffers grow.
        """
        if self._lookup is None or self._lookup[0] is not self.codebook:
            self._lookup = (self.codebook, lookup_tables(self.codebook, self.thresholds))
        tables = self._lookup[1]
        if self.thresholds is None:
            return tables[0], self.params[0], self.params[1], tables[1]
        return tables[0], tables[1], tables[2], tables[3]

    def codes(self, rows: slice, start: int, stop: int) -> Tensor:
        """Return the integer codes of consecutive tokens, unpacked, int16 ``[rows, H, stop - start, D]``."""
        planes = [layout.read(words[rows], start, stop) for layout, words in zip(self.layouts, self.words, strict=True)]
        return join_planes(planes, self.bits)

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Segment.read`; outliers are in full precision."""
        block = self.exact.block if self.exact is not None else 1
        first = start // block * block
        last = min(-(-stop // block) * block, self.length(rows))
        if self.thresholds is not None:
            scale, offset = (
                p.unflatten(-1, (self.heads, 1, self.channels)) for p in nuq.key_params(self.thresholds[rows])
            )
        else:
            scale, offset = (p[rows, None, first:last, None].float() for p in self.params)
        values = nuq.decode_nuq(self.codes(rows, first, last), scale, offset, self.codebook[rows][0, -1])
        if self.exact is not None:
            for number, row in enumerate(range(*rows.indices(len(self.lengths)))):
                self.exact.write_into(values[number], row, first // block)
        values = values[:, :, start - first : stop - first]
        return (values.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else values).to(dtype)

    def drop_back(self, row: int, count: int) -> None:
        """See :meth:`Segment.drop_back`; outliers are dropped too."""
        self.lengths[row] -= count
        if self.exact is not None:
            self.exact.keep_first(row, self.lengths[row])

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest tokens of some rows, with their outliers, and move the rest to the front.

        Raises:
            ValueError: `count` is neither the number of all tokens nor a multiple of the block size of the outliers'
                indices (:func:`kvbench.cache.segments.outliers.block_of`).
        """
        stop = self.lengths[rows][0]
        if self.exact is not None and count < stop and count % self.exact.block:
            raise ValueError(f"cannot drop {count} tokens: not a multiple of the block size, {self.exact.block}")
        if count < stop:
            for layout, words in zip(self.layouts, self.words, strict=True):
                layout.move_to_front(words[rows], count, stop)
            for param in self.params:
                param[rows, : stop - count] = param[rows, count:stop].clone()
        for row in range(*rows.indices(len(self.lengths))):
            self.lengths[row] = stop - count
            if self.exact is not None:
                self.exact.drop_first(row, -(-count // self.exact.block))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Segment.buffers`; what :meth:`lookup` has derived from the tables counts as ``scales`` too."""
        buffers = [("codes", words) for words in self.words] + [("scales", param) for param in self.params]
        buffers += [("scales", table) for table in (self.codebook, self.thresholds) if table is not None]
        derived = self._lookup[1] if self._lookup is not None else ()
        own = self.codebook.untyped_storage().data_ptr()  # of one row, the levels are the codebook itself
        buffers += [("scales", table) for table in derived if table.untyped_storage().data_ptr() != own]
        if self.exact is not None:
            buffers += [("index", self.exact.table), ("window", self.exact.values), ("index", self.exact.indices)]
        return buffers

    def used(self, row: int) -> dict[str, int]:
        """See :meth:`Segment.used`; the row's codebook and thresholds count too."""
        count = self.lengths[row]
        tables = [t[row] for t in (self.codebook, self.thresholds) if t is not None]
        scales = sum(t.numel() * t.element_size() for t in tables)
        scales += sum(count * param.element_size() for param in self.params)
        used = {"codes": -(-count * self.width * self.bits // 8), "scales": scales}
        if self.exact is not None:
            used["window"], used["index"] = self.exact.used(row)
        return used

    def select(self, index: Tensor) -> None:
        """See :meth:`Segment.select`."""
        super().select(index)
        if self.exact is not None:
            self.exact.select(index.tolist())

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`Segment.map_buffers`; the outliers' buffers are replaced too."""
        self.words = [change(words) for words in self.words]
        self.params = [change(param) for param in self.params]
        self.codebook = change(self.codebook)
        self.thresholds = None if self.thresholds is None else change(self.thresholds)
        self.exact = None if self.exact is None else self.exact.mapped(change)
