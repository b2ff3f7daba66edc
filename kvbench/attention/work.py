"""The description of a layer's stored keys and values by which a fused kernel reads them: formats, buffers, phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.rope.rotation_tables import Rope
from kvbench.cache.segments.layout import TILE
from kvbench.cache.segments.outliers import Outliers
from kvbench.quantizers.engine.amd import LEVELS
from kvbench.quantizers.engine.llamacpp import IQ4_NL

#: kinds whose values are a factor of their group of channels times an element that follows from the code alone
FACTORED = ("offset", "folded", "float", "levels", "levels_read", "iq4_nl", "octave")
#: levels of the kinds whose codes select an integer of a fixed table, by kind and bits
TABLES = {("iq4_nl", 4): IQ4_NL, **{("octave", bits): levels for bits, levels in LEVELS.items()}}

#: bytes of a scale, by :attr:`Format.scale`
SCALE_BYTES = {"": 0, "fp16": 2, "fp32": 4, "e4m3": 1}


@dataclass(frozen=True)
class Format:
    """Storage format of the keys or the values of a segment, as far as a kernel is compiled for it.

    Args:
        kind: how a value follows from its code. ``full``: not packed. ``affine``: code * scale + minimum. ``atom``:
            (code - zero point) * scale. ``hierarchical``: QuantSpec's two nibbles, whose 8-bit code is 16 * upper +
            lower + 8 with a signed lower nibble; the value is scale * (code - 8) / 16 + minimum. ``codebook``:
            level[code] * scale + offset, with a scale and an offset per channel (axis ``channel``, group 0) or per
            token of all heads (axis ``token``, group 0).
            In the other kinds, a value is one factor of its group times an element that follows from the code (axis
            ``token``): ``offset``: code - 2 ** (bits - 1). ``folded``: code - zero point, where the zero point is in
            the 4 lowest bits of the factor, which count as 0 in the product. ``float``: the number whose bits are the
            code: e4m3 (8 bits) or e2m1 (4 bits). ``levels`` (TurboQuant's keys): a level of a codebook that is
            compiled in. ``levels_read``: the same, divided by the length of the vector of the token's levels.
            ``iq4_nl``, ``octave``: the integer that the code selects from a table (:data:`TABLES`). ``cross`` (KVarN):
            as ``affine``, times a third parameter: for keys one per token, for values one per channel and group of
            tokens, the group being that of the keys.
        bits: bits of a code; 16 for ``full``.
        axis: ``channel`` for per-channel quantization: a group is consecutive tokens of one channel. ``token`` for
            per-token quantization: a group is consecutive channels of one token. Empty for ``full``.
        group: number of elements in a group, which share a scale and a minimum or zero point; 0 for ``full``.
        window: 0 if groups do not cross tile boundaries. Otherwise (LogQuant's W = 42) the number of tokens that are
            packed at a time. They are divided into as few groups as possible of at most `group` tokens. If these
            cannot be equal, the first ones have one token more
            (:class:`kvbench.quantizers.windowed.WindowedQuantizer`).
        scale: type in which scales, or factors, are stored: ``fp16``, ``fp32`` or ``e4m3``; empty if there are none.
        padding: number of unused factors after those of each token (:class:`kvbench.quantizers.affine.Parameter`).
    """

    kind: str
    bits: int
    axis: str = ""
    group: int = 0
    window: int = 0
    scale: str = "fp16"
    padding: int = 0

    @property
    def group_bytes(self) -> int:
        """Bytes of the parameters of one group (two parameters, or one factor), without cross factors."""
        if self.kind == "full":
            return 0
        return SCALE_BYTES[self.scale] * (1 if self.kind in FACTORED else 2)


@dataclass
class Codebook:
    """The tables of a segment whose codes are looked up in a codebook.

    Args:
        levels: levels of each row, fp32 ``[B, 2**bits]``.
        scale: factor on the levels, fp16: of each channel of all heads, ``[B, C]``, if the axis is ``channel``; of each
            token, ``[B, capacity]``, if it is ``token``.
        offset: number added to the product, in the shape of `scale`.
        outliers: elements that are also stored, in full precision; None if there are none.
        stand_in: what the code of an outlier stands for, fp32: the dequantized element of each channel, ``[B, C]``, if
            the axis is ``channel``; the level, ``[B]``, if it is ``token``.
    """

    levels: Tensor
    scale: Tensor
    offset: Tensor
    stand_in: Tensor
    outliers: Outliers | None = None


@dataclass
class Part:
    """The buffers and the format of one segment of keys or of values, as a kernel reads them.

    Args:
        words: packed codes, int16 ``[B, H, tiles, ...]``, one tensor per plane. The plane of the most significant bits
            comes first. Empty if not packed.
        params: parameter tensors: scales, then minima or zero points, then cross factors, as far as the kind has them
            (:class:`kvbench.cache.segments.packed.PackedSegment`). Empty if not packed.
        buffer: keys or values in full precision, ``[B, H, capacity, D]``; None if packed.
        codebook: levels and outliers, if the kind is ``codebook``; else None.
        factor: factor on all values in addition to those in `params`; other than 1 only if the kind is ``float`` or
            ``octave``.
    """

    format: Format
    words: Sequence[Tensor] = ()
    params: Sequence[Tensor] = ()
    buffer: Tensor | None = None
    codebook: Codebook | None = None
    factor: float = 1.0


@dataclass
class Received:
    """Buffer for the attention that tokens receive in a decode step, for methods that observe it.

    Args:
        buffer: fp32 ``[B, H, S, q, slots]``, contiguous: the attention from each of the q new tokens to every slot. S
            is 1, or the number of query heads per KV head if these are kept apart.
        mean: True for the mean over the query heads of a KV head, False for their sum; without effect if they are kept
            apart.
    """

    buffer: Tensor
    mean: bool


@dataclass
class Work:
    """Description of one layer's stored keys and values for a decode kernel, for the whole batch.

    The tokens are divided into *phases*: runs of consecutive tokens whose keys are all in one segment, and whose values
    are all in one segment, so that formats do not change within a phase.

    Args:
        phases: for each phase, in the order of the slots, a pair: the segment of its keys and the segment of its
            values. In the last phase both are in full precision, and it ends with the newest tokens.
        table: where each phase lies in each row of the batch, int32 ``[B, phases, 3]`` on the layer's device. The three
            numbers are the index of the phase's first token in the key segment, the index of the same token in the
            value segment, and the number of tokens (0 if the row has none). If both segments are packed, the two
            indices are equal modulo the tile size.
        counts: the contents of `table` as nested lists on the host.
        room: number of tokens for which the buffers of a row have room; None if unknown. Kernels derive the number of
            thread blocks per head from it and not from the current length. So a step that is replayed as a CUDA graph
            and one that is launched normally add up partial results in the same order.
        received: where to write the attention that tokens receive; None if the method does not observe it.
        rope: the rotation that keys still need, if they are stored before RoPE; else None.
        in_place: True if the phases are runs that must be read in the order of the text, of which there are many.
        prepared: results for these buffers that a kernel reuses in later steps, by arbitrary keys.
    """

    phases: list[tuple[Part, Part]]
    table: Tensor
    counts: list[list[tuple[int, int, int]]]
    heads: int
    key_dim: int
    value_dim: int
    room: int | None = None
    logits: Logits = PLAIN
    received: Received | None = None
    rope: Rope | None = None
    in_place: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def signature(self) -> tuple[tuple[Format, Format], ...]:
        """Return a pair for each phase: the format of its keys and the format of its values.

        A kernel is compiled once for each distinct list of such pairs.
        """
        return tuple((key.format, value.format) for key, value in self.phases)

    def tiles(self) -> int:
        """Return the largest number of tiles of 128 tokens that a kernel may have to read in a row.

        If `room` is known, these are all tiles for which the buffers have room. Otherwise they are the tiles of the
        longest row.
        """
        filled = max(sum(-(-count // TILE) for _, _, count in row) for row in self.counts)
        return filled if self.room is None else max(filled, -(-self.room // TILE))

    def longest(self) -> list[int]:
        """Return, for each phase, the largest number of tokens that any row has in it."""
        return [max(row[i][2] for row in self.counts) for i in range(len(self.phases))]
