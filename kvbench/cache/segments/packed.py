"""Packed segments: quantized tokens as words of packed codes and the parameters of their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Deferred, Form
from kvbench.cache.kernels.pack import considered, pack, served
from kvbench.cache.kernels.pack_together import Job, Thin, thin_after_packing
from kvbench.cache.kernels.reads import uncopied
from kvbench.cache.segments.base import FullSegment, Segment, Side, allocate
from kvbench.cache.segments.layout import TILE, TileLayout
from kvbench.cache.watch import Watch
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

#: number of tokens that torch encodes at a time, which bounds the fp32 temporaries of a long prompt
ENCODED = 2048
#: number of elements that torch encodes at a time on a CPU, whose caches hold them; at least a tile is encoded
CACHED = 1 << 19


class HostPacker(Protocol):
    """Function that quantizes tokens on a CPU and packs them (:func:`kvbench.attention.cpu.pack.pack_tokens`)."""

    def __call__(self, segment: PackedSegment, row: int, x: Tensor, start: int) -> bool:
        """Return True if the tokens were packed, False if torch must do it."""
        ...


def fits_tiles(quantizer: AffineQuantizer) -> bool:
    """Return True if every group of tokens lies within one tile or consists of whole tiles.

    It can be False only for quantizers that cut groups from windows
    (:class:`~kvbench.quantizers.windowed.WindowedQuantizer`).
    """
    if not isinstance(quantizer, WindowedQuantizer):
        return True
    window = quantizer.window
    return quantizer.even and quantizer.group_size in (32, 64, 128) and (window % TILE == 0 or TILE % window == 0)


class PackedSegment(Segment):
    """Quantized tokens: packed codes, and the parameters (scale, and minimum or zero point) of their groups.

    The codes are in buffers of int16 words, ``[B, H, tiles, ...]``, in tiles of 128 tokens
    (:mod:`~kvbench.cache.segments.layout`). Codes of several planes (3, 5, 6 and 8 bits) take one such buffer for each.
    The parameters have buffers as the quantizer describes them
    (:meth:`~kvbench.quantizers.affine.AffineQuantizer.parameters`), of shape ``[B, H, tiles * 128 / G, D]`` for
    per-channel groups of G tokens and ``[B, H, tiles * 128, D / G]`` for per-token groups of G channels.

    The first arguments are those of :class:`~kvbench.cache.segments.interface.Segment`.

    Args:
        side: ``key`` or ``value``; the memory layout of the codes differs
            (:class:`~kvbench.cache.segments.layout.TileLayout`).
        capacity: number of tokens per row to allocate for; the buffers grow if it is exceeded.
        whole_tiles: True to count the bytes of the last tile in :meth:`used` as if the tile were full. This is for
            segments so short that the unused part of this tile matters.
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
        quantizer: AffineQuantizer,
        side: Side,
        capacity: int = 0,
        whole_tiles: bool = False,
    ) -> None:
        super().__init__(batch, heads, channels, dtype, device)
        self.quantizer, self.side, self.whole_tiles = quantizer, side, whole_tiles
        #: record in which kernels note NaN and Inf, and the tag of this segment; None: checked after each call instead
        self.watch: tuple[Watch, int] | None = None
        #: the cache's queue of deferred packing, which shares launches; None if the segment belongs to no cache
        self.packs: Deferred[Job | Thin] | None = None
        #: packs tokens on a CPU; None: torch does
        self.packer: HostPacker | None = None
        #: what the packer has prepared for the present buffers
        self.prepared: Any = None
        planes = quantizer.planes(channels)
        self.layouts = [TileLayout(width, side) for width, _ in planes]
        self.plane_channels = [wide for _, wide in planes]
        #: descriptions of the buffers of parameters, in the order of :attr:`params`
        self.parameters = quantizer.parameters(dtype)
        self.words: list[Tensor] = []
        self.params: list[Tensor] = []
        self._allocate(batch, -(-capacity // TILE))

    @property
    def capacity(self) -> int:
        """Number of tokens per row for which the buffers have room."""
        return self.tiles * TILE

    @property
    def by_token(self) -> bool:
        """True if every group belongs to one token, so that single tokens can be dropped and moved."""
        return all(parameter.axis == "token" for parameter in self.parameters)

    @property
    def _unit(self) -> int:
        """Number of tiles by whose multiples buffers grow, so that they end with a whole block of the quantizer.

        This matters for blocks of several tiles, such as W = 256 tokens in LogQuant, because kernels find a tile's
        parameters by the tile's number.
        """
        return self.quantizer.block_tokens // TILE if self.quantizer.block_tokens % TILE == 0 else 1

    def _allocate(self, batch: int, tiles: int) -> None:
        """Allocate buffers of at least `tiles` tiles and copy the contents of the present ones."""
        tiles = -(-tiles // self._unit) * self._unit
        old_words, old_params, self.tiles = self.words, self.params, tiles
        self.words = [
            allocate((batch, self.heads, *layout.shape(tiles, channels)), torch.int16, self.device).zero_()
            for layout, channels in zip(self.layouts, self.plane_channels, strict=True)
        ]
        # Groups need not fit tiles (LogQuant, W = 42): make room for every group that begins in the tiles, and for one
        # more, as kernels read the parameters of two groups wherever one might end.
        beyond = 0 if fits_tiles(self.quantizer) else 2 * self.quantizer.block_tokens
        self.params = [
            allocate(
                (batch, self.heads, *parameter.shape(tiles * TILE + beyond, self.channels)),
                parameter.dtype,
                self.device,
            ).zero_()
            for parameter in self.parameters
        ]
        # at the first call there are no old buffers
        for target, source in zip(self.words + self.params, old_words + old_params, strict=False):
            target[:, :, : source.shape[2]].copy_(source)

    def append(self, rows: slice, x: Tensor) -> None:
        """Quantize tokens, ``[rows, H, n, D]``, and append them to some rows.

        n must be a multiple of ``quantizer.block_tokens``: the tokens of a group, or 1 if groups do not run along
        tokens.
        """
        self._append(rows, x, None)

    def append_chosen(self, rows: slice, x: Tensor, index: Tensor) -> None:
        """See :meth:`Segment.append_chosen`; the number of tokens must be a multiple as for :meth:`append`."""
        self._append(rows, x, index)

    def _append(self, rows: slice, x: Tensor, index: Tensor | None) -> None:
        start = self.lengths[rows][0]
        count = x.shape[2] if index is None else len(index)
        if not count:
            return
        if start + count > self.capacity:
            needed = -(-(start + count) // TILE)
            # a prompt gets the room that it needs; only a segment that grows gets more
            self._allocate(len(self.lengths), needed + (needed // 2 if start else 0))
        if (
            index is None
            and self.packer is not None
            and self.packer(self, rows.indices(len(self.lengths))[0], x, start)
        ):
            self.lengths[rows] = [start + count] * len(self.lengths[rows])
            return
        # an incomplete group goes to the quantizer, which raises
        how = None if count % self.quantizer.block_tokens else self._served(x)
        if how is not None:
            pack(self, how, rows.indices(len(self.lengths))[0], x, start, index)
        else:
            per, most = self.quantizer.block_tokens, ENCODED
            if x.device.type == "cpu":
                tiles = CACHED // (TILE * max(x.shape[0] * x.shape[1] * x.shape[3], 1))
                most = min(most, max(tiles, 1) * TILE)
            step = max(most // per, 1) * per  # whole groups only
            for first in range(0, count, step):
                last = first + step
                part = x[:, :, first:last] if index is None else x.index_select(2, index[first:last])
                self._encode(rows, start + first, part)
        self.lengths[rows] = [start + count] * len(self.lengths[rows])

    def _served(self, x: Tensor) -> Form | None:
        """Return the form of the kernel that packs tokens; if none does, record why (on a GPU) and return None."""
        how = served(self, x)
        if isinstance(how, Form):
            return how
        if considered(x.device):
            self.by_torch.add(f"packing by torch ({how})")
        return None

    def _encode(self, rows: slice, start: int, x: Tensor) -> None:
        codes, params = self.quantizer.encode(x)
        planes = self.quantizer.split(codes)
        for layout, words, plane in zip(self.layouts, self.words, planes, strict=True):
            layout.write(words[rows], start, plane)
        for buffer, param, parameter in zip(self.params, params, self.parameters, strict=True):
            first = parameter.row(start)
            buffer[rows, :, first : first + param.shape[2]].copy_(param)

    def appends_each(self, x: Tensor) -> bool:
        """Return True if :meth:`append_each` can append `x`: no group runs along tokens, and no kernel packs it."""
        return self.by_token and self._served(x) is None

    def append_each(self, x: Tensor) -> None:
        """Quantize tokens ``[B, H, n, D]`` for which :meth:`appends_each` returns True, and append them to all rows.

        The rows may hold different numbers of tokens.
        """
        count = x.shape[2]
        if max(self.lengths) + count > self.capacity:
            needed = -(-(max(self.lengths) + count) // TILE)
            self._allocate(len(self.lengths), needed + needed // 2)
        if self.packer is not None and all(
            self.packer(self, row, x[row : row + 1], start) for row, start in enumerate(self.lengths)
        ):
            self.lengths[:] = [length + count for length in self.lengths]
            return
        codes, params = self.quantizer.encode(x)
        planes = self.quantizer.split(codes)
        first, rows = torch.tensor(self.lengths, device=self.device), torch.arange(len(x), device=self.device)
        for i in range(count):
            for layout, words, plane in zip(self.layouts, self.words, planes, strict=True):
                layout.write_each(words, first + i, plane[:, :, i])
            for buffer, param in zip(self.params, params, strict=True):
                buffer[rows, :, first + i] = param[:, :, i]
        self.lengths[:] = [length + count for length in self.lengths]

    def advance(self) -> list[int]:
        """Make room for one new token of every row, which counts as stored at once; a kernel quantizes it later.

        Returns:
            For each row, the index of its new token.
        """
        places = list(self.lengths)
        if max(places, default=0) + 1 > self.capacity:
            self._allocate(len(places), self.tiles + self.tiles // 2 + 1)
        self.lengths[:] = [length + 1 for length in places]
        return places

    def thin(self, window: FullSegment, rows: slice, count: int) -> None:
        """Drop every second one of the oldest tokens of a window, after they have been appended to this segment.

        These are the second, the fourth, ... of the first ``2 * count``. If packing is deferred
        (:mod:`kvbench.cache.kernels.pack_together`), so is this.
        """
        start, length = window.starts[rows][0], window.lengths[rows][0]
        first, last, _ = rows.indices(len(window.lengths))
        window.starts[rows], window.lengths[rows] = [start] * (last - first), [length - count] * (last - first)
        reason = uncopied(window.dtype)
        if reason and considered(window.device):
            self.by_torch.add(f"thinning by torch ({reason})")
        thin_after_packing(self, Thin(window.buffer, (first, last), start, length, count))

    def codes(self, rows: slice, start: int, stop: int) -> Tensor:
        """Return the integer codes of consecutive tokens, unpacked, int16 ``[rows, H, stop - start, D]``."""
        planes = [layout.read(words[rows], start, stop) for layout, words in zip(self.layouts, self.words, strict=True)]
        return self.quantizer.join(planes)

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Segment.read`."""
        return self._decoded(self.quantizer, self.codes, rows, start, stop, dtype)

    def read_minima(self, rows: slice, start: int, stop: int) -> Tensor:
        """Return the value of code 0 in each group of consecutive tokens, fp32 ``[rows, H, stop - start, groups]``."""
        params = tuple(buffer[rows, :, start:stop] for buffer in self.params)
        return self.quantizer.minimum(params)

    def read_upper(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Segment.read_upper`."""
        if not isinstance(self.quantizer, HierarchicalQuantizer):
            return self.read(rows, start, stop, dtype)
        return self._decoded(self.quantizer.upper, self._upper_codes, rows, start, stop, dtype)

    def _upper_codes(self, rows: slice, start: int, stop: int) -> Tensor:
        return self.layouts[0].read(self.words[0][rows], start, stop)

    def _decoded(
        self,
        quantizer: AffineQuantizer,
        codes: Callable[[slice, int, int], Tensor],
        rows: slice,
        start: int,
        stop: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Decode the groups that hold tokens ``[start, stop)`` and return these tokens."""
        per = quantizer.block_tokens
        first, last = start // per * per, -(-stop // per) * per
        params = tuple(
            buffer[rows, :, parameter.row(first) : parameter.row(last)]
            for buffer, parameter in zip(self.params, self.parameters, strict=True)
        )
        values = quantizer.decode(codes(rows, first, last), params, dtype)
        return values[:, :, start - first : stop - first]

    def drop_back(self, row: int, count: int) -> None:
        """Drop the newest tokens of one row.

        Raises:
            TypeError: groups run along tokens (axis ``channel``), so a group cannot lose a single token.
        """
        if not self.by_token:
            raise TypeError("tokens of a per-channel group cannot be removed one by one")
        self.lengths[row] -= count

    def drop_front(self, rows: slice, count: int) -> None:
        """Drop the oldest tokens of some rows, and move the codes and parameters of the others to the front.

        Raises:
            ValueError: `count` is not a multiple of ``quantizer.block_tokens`` (see :meth:`append`).
        """
        per, stop = self.quantizer.block_tokens, self.lengths[rows][0]
        if count % per:
            raise ValueError(f"{count} tokens are not a multiple of the group size, {per}")
        if count < stop:
            for layout, words in zip(self.layouts, self.words, strict=True):
                layout.move_to_front(words[rows], count, stop)
            for param, parameter in zip(self.params, self.parameters, strict=True):
                first, last = parameter.row(count), parameter.row(-(-stop // per) * per)
                param[rows, :, : last - first] = param[rows, :, first:last].clone()
        self.lengths[rows] = [stop - count] * len(self.lengths[rows])

    def permute(self, rows: slice, start: int, index: Tensor) -> None:
        """Reorder n consecutive tokens of some rows without quantizing them again: ``new[i] = old[index[i]]``.

        Args:
            start: index of the first of these tokens within the segment.
            index: counted from `start`, ``[n]``.

        Raises:
            TypeError: groups run along tokens (axis ``channel``), so a token cannot leave its group.
        """
        if not self.by_token:
            raise TypeError("tokens of a per-channel group cannot be moved one by one")
        index, stop = index.to(self.device), start + len(index)
        for layout, words in zip(self.layouts, self.words, strict=True):
            layout.write(words[rows], start, layout.read(words[rows], start, stop).index_select(2, index))
        for param in self.params:
            param[rows, :, start:stop] = param[rows, :, start:stop].index_select(2, index)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`Segment.buffers`; the parameters of groups count as ``scales``."""
        return [("codes", words) for words in self.words] + [("scales", param) for param in self.params]

    def used(self, row: int) -> dict[str, int]:
        """See :meth:`Segment.used`; with ``whole_tiles``, the free room in the last tile counts too."""
        count = self.lengths[row]
        if self.whole_tiles:
            count = -(-count // (self._unit * TILE)) * self._unit * TILE
        scales = sum(self.heads * parameter.nbytes(count, self.channels) for parameter in self.parameters)
        bits = sum(layout.width * wide for layout, wide in zip(self.layouts, self.plane_channels, strict=True))
        return {"codes": -(-self.heads * count * bits // 8), "scales": scales}

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`Segment.map_buffers`."""
        self.prepared = None  # it would keep the old words in memory
        self.words = [change(words) for words in self.words]
        self.params = [change(param) for param in self.params]
