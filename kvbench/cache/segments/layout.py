"""The memory layout of codes: tiles of 128 tokens, packed with a stride into int16 words.

A tile holds 128 tokens of one (row, KV head). A code is stored in one or more planes (8 bits: two nibbles). In a plane
of w bits a word has ``F = 16 / w`` fields, and a tile has ``N = 128 / F`` word rows. Field i of word ``(r, d)``, at
bits ``[i * w, (i + 1) * w)``, is the code of token ``i * N + r`` and channel d. So field i of all words holds N
consecutive tokens, which one shift and one mask extract without interleaving; and with groups of 32, 64 or 128 tokens,
each int4 field of keys is in one group.

Keys are stored ``[..., tiles, N, D]`` (channels contiguous), values ``[..., tiles, D, N]`` (word rows contiguous), as
the two matrix products of decode attention read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

#: number of tokens in a tile
TILE = 128


@dataclass(frozen=True)
class TileLayout:
    """The memory layout of packed codes: which bits of which int16 word hold the code of a given token and channel.

    With codes of 4 bits, for example, F is 4 and N is 32: word 0 of a channel holds tokens 0, 32, 64 and 96, the first
    in its lowest bits.

    Args:
        width: bits of a field: 1, 2 or 4. (Other codes are split into planes, each with its own layout.)
        order: order of a tile's words in memory. ``key``: ``[..., tiles, N, D]``. ``value``: ``[..., tiles, D, N]``.
    """

    width: int
    order: Literal["key", "value"]

    @property
    def fields(self) -> int:
        """Number of codes in a word, F; each is that of a different token."""
        return 16 // self.width

    @property
    def rows(self) -> int:
        """Number of words per channel of a tile, N."""
        return TILE // self.fields

    def shape(self, tiles: int, channels: int) -> tuple[int, int, int]:
        """Return the shape of some tiles' words, for one row and KV head: ``(tiles, N, D)`` or ``(tiles, D, N)``."""
        return (tiles, self.rows, channels) if self.order == "key" else (tiles, channels, self.rows)

    def read(self, words: Tensor, start: int, stop: int) -> Tensor:
        """Return the codes of consecutive tokens, int16 ``[..., stop - start, D]``.

        The words have the shape of :meth:`shape`, with any leading dimensions; `stop` is exclusive.
        """
        first, last = start // TILE, -(-stop // TILE)
        codes = self.unpack(words.narrow(-3, first, last - first))
        return codes.narrow(-2, start - first * TILE, stop - start)

    def write(self, words: Tensor, start: int, codes: Tensor) -> None:
        """Write the codes of n consecutive tokens into packed words, in place; the codes of other tokens stay.

        Args:
            words: words in the shape of :meth:`shape`, with any leading dimensions.
            start: index of the first token to write.
            codes: of any integer dtype, ``[..., n, D]``.
        """
        count = codes.shape[-2]
        done = 0
        while done < count:
            tile, within = divmod(start + done, TILE)
            if within == 0 and count - done >= TILE:
                whole = (count - done) // TILE
                block = codes.narrow(-2, done, whole * TILE)
                words.narrow(-3, tile, whole).copy_(self.pack(block))
                done += whole * TILE
            else:
                field, row = divmod(within, self.rows)
                run = min(self.rows - row, count - done)
                self._write_run(words.select(-3, tile), field, row, codes.narrow(-2, done, run))
                done += run

    def write_each(self, words: Tensor, places: Tensor, codes: Tensor) -> None:
        """Write the code of one token per row of the batch, in place; the codes of other tokens stay.

        Args:
            words: words in the shape of :meth:`shape`, behind the dimensions of rows and heads.
            places: index of the token of each row, int64 ``[B]``.
            codes: its codes, of any integer dtype, ``[B, H, D]``.
        """
        rows = torch.arange(len(places), device=words.device)
        tile, within = places // TILE, places % TILE
        field, row = within // self.rows, within % self.rows
        at = (rows, slice(None), tile, row) if self.order == "key" else (rows, slice(None), tile, slice(None), row)
        shift = (field * self.width).to(torch.int32)[:, None, None]
        other_fields = words[at].to(torch.int32) & (0xFFFF ^ (((1 << self.width) - 1) << shift))
        words[at] = to_int16(other_fields | (codes.to(torch.int32) << shift))

    def move_to_front(self, words: Tensor, start: int, stop: int) -> None:
        """Move the codes of the tokens ``[start, stop)`` so that the first of them becomes token 0, in place.

        The words have the shape of :meth:`shape`, with any leading dimensions.
        """
        if start % TILE:
            self.write(words, 0, self.read(words, start, stop))
            return
        first, last = start // TILE, -(-stop // TILE)
        words.narrow(-3, 0, last - first).copy_(words.narrow(-3, first, last - first).clone())

    def _write_run(self, tile: Tensor, field: int, row: int, codes: Tensor) -> None:
        """Write `codes` into field `field` of consecutive word rows of one tile, the first being `row`."""
        if self.order == "value":
            codes = codes.transpose(-1, -2)
        target = tile.narrow(-2 if self.order == "key" else -1, row, codes.shape[-2 if self.order == "key" else -1])
        shift, mask = field * self.width, (1 << self.width) - 1
        other_fields = target.to(torch.int32) & (0xFFFF ^ (mask << shift))
        target.copy_(to_int16(other_fields | (codes.to(torch.int32) << shift)))

    def pack(self, codes: Tensor) -> Tensor:
        """Pack the codes of whole tiles, of any integer dtype, into words.

        The codes are ``[..., tiles * 128, D]``; the int16 words have the shape of :meth:`shape` behind the same leading
        dimensions.
        """
        grid = codes.unflatten(-2, (-1, self.fields, self.rows)).to(torch.int32)
        words = to_int16((grid << self.shifts(torch.int32, codes.device)).sum(-3, dtype=torch.int32))
        return words if self.order == "key" else words.transpose(-1, -2)

    def unpack(self, words: Tensor) -> Tensor:
        """Return all codes of whole tiles, int16 ``[..., tiles * 128, D]``.

        The words have the shape of :meth:`shape`, with any leading dimensions.
        """
        if self.order == "value":
            words = words.transpose(-1, -2).contiguous()  # a quarter of the codes' bytes, or less
        grid = (words.unsqueeze(-3) >> self.shifts(torch.int16, words.device)).bitwise_and_((1 << self.width) - 1)
        return grid.flatten(-4, -2)

    def shifts(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the offset in bits of each field within a word, ``[F, 1, 1]``: 0, width, 2 * width, ..."""
        return _shifts(self.fields, self.width, dtype, device)


@lru_cache(maxsize=64)
def _shifts(fields: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        return (torch.arange(fields, device=device, dtype=dtype) * width)[:, None, None]


def to_int16(words: Tensor) -> Tensor:
    """Return the low 16 bits of each int32 word as int16; bit 15 becomes the sign."""
    return (((words & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
