"""Formats that vLLM has for AMD GPUs: ``ultraquant_4bit`` and the ``octave`` family.

Sources: vllm-project/vllm 0.33.0, ``ultraquant/format.py``, ``ultraquant/reference.py`` and ``rocm_octave.py``
(Apache-2.0). The engine rotates keys (ultraquant) or keys and values (octave) first; see :mod:`kvbench.rotation`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.quantizers.affine import Parameter
from kvbench.quantizers.engine.base import E2M1, SIGN, TokenQuantizer, from_e2m1
from kvbench.quantizers.packing import look_up
from kvbench.quantizers.turboquant import ordered_sum

#: bias of the exponent byte of a power of two
BIAS = 127
#: ratio of the scale to the largest magnitude of a block, before it is rounded to a power of two
RATIO = 0.156
#: octave: levels for normally distributed channels by bits, and the number that stands for one standard deviation
LEVELS = {
    3: (-127, -79, -45, -14, 14, 45, 79, 127),
    4: (-126, -95, -74, -58, -43, -30, -18, -6, 6, 18, 30, 43, 58, 74, 95, 126),
}
DEVIATION = {3: 59.0, 4: 46.0}
#: octave: channels per block of keys
BLOCK = 64
#: octave: factor of the stored scales, which keeps small ones above fp16's subnormal numbers
FIXED = 64.0


class UltraQuant(TokenQuantizer):
    """vLLM's ``ultraquant_4bit``: e2m1 codes in blocks of 32 channels, each with a power of two as its scale.

    ::

        s  = 2^floor(log2(0.156 * absmax) + 0.5)
        q  = the e2m1 number nearest to x / s, the lower one at a tie
        x^ = q * s

    The scale is stored as the byte ``log2(s) + 127``, or 0 for a block of zeros. Bytes per token and head:
    ``D / 2 + D / 32`` (4.25 bits per element).
    """

    bits = 4
    group_size = 32
    stored = (torch.uint8,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scale bytes; arguments and result: see :meth:`TokenQuantizer.encode_blocks`."""
        wanted = x.abs().amax(-1) * RATIO
        zero = wanted <= 0
        exponent = (torch.log2(torch.where(zero, 1.0, wanted)) + 0.5).floor().clamp(-126, 127)
        levels = torch.tensor([-level for level in E2M1[:0:-1]] + list(E2M1), device=x.device)
        place = torch.bucketize(x / torch.exp2(exponent)[..., None], (levels[1:] + levels[:-1]) / 2)
        # places 0 to 6 are the negative levels, from the largest magnitude down
        codes = torch.where(place < 7, SIGN + 7 - place, place - 7)
        scale = torch.where(zero, 0, exponent + BIAS).to(torch.uint8)
        return torch.where(zero[..., None], 0, codes), (scale,)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e2m1(code) * s``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        scale = torch.where(params[0] == 0, 0.0, torch.exp2(params[0].float() - BIAS))
        return from_e2m1(codes).mul_(scale[..., None])


class Octave(TokenQuantizer):
    """One side of vLLM's ``octave`` formats: codes for normally distributed channels, with scales that keep the norm.

    With the levels v of 3 or 4 bits, for each block of channels with the root mean square r::

        q  = the level nearest to x / r * d, the lower one at a tie; d = 59 (3 bits) or 46 (4 bits)
        S  = half(64 * sum(x^2) / sum(x * v[q]))
        x^ = v[q] * S / 64

    so that the product of x and x^ is the squared norm of x. Values, and compact keys, are one block of all channels.
    Other keys have blocks of 64 channels; the blocks of channels to which RoPE applies have 4 bits, the others 3. Bytes
    per token and head: ``D * bits / 8 + 2 * blocks``, and padding, counted with the values, that rounds the sum of both
    sides up to a multiple of 8 (compact: 4).

    Args:
        block: channels per block; None for all channels of a head.
        wide: number of first channels that have 4 bits, if the others have 3, which no kernel reads; None if all have
            `bits`.
        padding: number of unused fp16 numbers that each token and head is padded with.
    """

    stored = (torch.float16,)
    #: factor on the stored scales
    factor = 1 / FIXED

    def __init__(self, bits: int, block: int | None, wide: int | None = None, padding: int = 0) -> None:
        self.bits, self.group_size, self.padding = bits, block, padding
        self.wide = None if wide is None or bits == 3 else wide
        self.kind = "octave" if self.wide is None else "engine"
        super().__init__()

    def __repr__(self) -> str:
        return f"Octave(bits={self.bits}, block={self.group_size}, wide={self.wide})"

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the scales, whose rows are padded if `padding` is not 0."""
        return (Parameter(torch.float16, "token", self.group_size, padding=self.padding),)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        first = self._wide_blocks(x)
        parts = [looked_up(x[..., :first, :], 4), looked_up(x[..., first:, :], 3)]
        codes, scale = (
            torch.cat(tensors, dim) for tensors, dim in zip(zip(*parts, strict=True), (-2, -1), strict=True)
        )
        return codes, (torch.nn.functional.pad(scale.half(), (0, self.padding)),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``v[code] * S / 64``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        first, blocks = self._wide_blocks(codes), codes.shape[-2]
        if 0 < first < blocks:
            parts = codes[..., :first, :], codes[..., first:, :]
            values = torch.cat([look_up(levels_like(4, codes), parts[0]), look_up(levels_like(3, codes), parts[1])], -2)
        else:
            values = look_up(levels_like(4 if first else 3, codes), codes)
        return values.mul_((params[0][..., :blocks].float() / FIXED)[..., None])

    def planes(self, channels: int) -> tuple[tuple[int, int], ...]:
        """Describe the planes of codes: if only `wide` channels have 4 bits, the highest bit has a plane of its own."""
        return super().planes(channels) if self.wide is None else ((1, self.wide), (2, channels), (1, channels))

    def split(self, codes: Tensor) -> list[Tensor]:
        """Split codes, uint8 ``[..., D]``, into the planes that :meth:`planes` describes."""
        if self.wide is None:
            return super().split(codes)
        return [codes[..., : self.wide] >> 3, codes >> 1 & 3, codes & 1]

    def join(self, planes: list[Tensor]) -> Tensor:
        """Combine planes into codes; the inverse of :meth:`split`."""
        if self.wide is None:
            return super().join(planes)
        highest = torch.nn.functional.pad(planes[0], (0, planes[1].shape[-1] - self.wide))
        return highest << 3 | planes[1] << 1 | planes[2]

    def _wide_blocks(self, x: Tensor) -> int:
        """Return how many of the blocks of a grouped tensor have codes of 4 bits."""
        if self.bits == 3:
            return 0
        return x.shape[-2] if self.wide is None else self.wide // x.shape[-1]


def looked_up(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize blocks, fp32 ``[..., blocks, channels]``, to the levels of :data:`LEVELS`.

    Returns:
        The codes, uint8 in the shape of `x`, and the scales times :data:`FIXED`, fp32 ``[..., blocks]``.
    """
    levels = levels_like(bits, x)
    squares = ordered_sum(x.square())
    size = torch.full((), x.shape[-1], dtype=torch.float32, device=x.device)
    root = (squares / size).sqrt().clamp(min=1e-12)
    codes = torch.bucketize(x / root * DEVIATION[bits], (levels[1:] + levels[:-1]) / 2)
    product = ordered_sum(x * levels[codes])
    scale = torch.where(product > 0, squares / product.clamp(min=1e-30), 0.0) * FIXED
    return codes.to(torch.uint8), scale.squeeze(-1)


def levels_like(bits: int, like: Tensor) -> Tensor:
    """Return the levels of codes with `bits` bits, fp32, on the device of `like`."""
    return _level_tensor(bits, str(like.device))


@cache
def _level_tensor(bits: int, device: str) -> Tensor:
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        return torch.tensor(LEVELS[bits], dtype=torch.float32, device=device)


def octave(name: str, head_dim: int, rope_dim: int) -> tuple[Octave, Octave]:
    """Return the quantizers of keys and of values of one of vLLM's octave formats.

    Args:
        name: ``octave_k3v4``, ``octave_k3v3`` or ``octave_k3v3_compact``.
        rope_dim: number of first channels to which the model applies RoPE.

    Raises:
        ConfigError: the format does not exist for these numbers of channels.
    """
    compact = name.endswith("compact")
    if head_dim % BLOCK or rope_dim % BLOCK:
        raise ConfigError(
            "method.format",
            name,
            f"needs heads, and RoPE, of a multiple of {BLOCK} channels, not {head_dim} with {rope_dim}",
        )
    if compact and head_dim & (head_dim - 1):
        raise ConfigError("method.format", name, f"needs heads of a power of two of channels, not {head_dim}")
    bits = 4 if name.startswith("octave_k3v4") else 3
    raw = slot_bytes(head_dim, rope_dim, bits, compact)
    padding = -raw % (4 if compact else 8) // 2
    if compact:
        return Octave(3, None), Octave(bits, None, padding=padding)
    key = Octave(3, BLOCK) if rope_dim == 0 else Octave(4, BLOCK, None if rope_dim == head_dim else rope_dim)
    return key, Octave(bits, None, padding=padding)


def slot_bytes(head_dim: int, rope_dim: int, bits: int, compact: bool) -> int:
    """Return the bytes of a key and a value of one token and head, before they are padded.

    Args:
        compact: True for compact keys: 3 bits in all channels, one scale.
    """
    wide = 0 if compact else rope_dim
    scales = 2 if compact else head_dim // BLOCK + 1
    return wide // 2 + (head_dim - wide) * 3 // 8 + head_dim * bits // 8 + 2 * scales
