"""SGLang's ``fp4_mx_block16``, and two integer formats of forks of SGLang: ``int8fork`` and SAW-INT4.

Sources: sgl-project/sglang 0.5.23, ``kvfp4_tensor.py`` (Apache-2.0); jindajia/sglang-fork, ``kv_quant_kernels.py`` and
``fused_hadamard_int4_kv.py`` (0d0a35bb), which togethercomputer/saw-int4 (MIT) runs. SGLang itself has no int8 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.engine.base import TokenQuantizer, from_e2m1, quotient, to_e2m1

#: bias of the exponent byte of a power of two
BIAS = 127


class Ranged(TokenQuantizer):
    """Asymmetric codes with an fp32 scale and a fractional fp32 zero point per token and head, in forks of SGLang.

    ::

        s  = max(max - min, 1e-8) / (2**bits - 1)
        z  = -min / s
        q  = trunc(x / s + z + 0.5)
        x^ = (q - z) * s

    The kernels pad a head with zeros to a power of two of channels: unless D is a power of two, min is therefore at
    most 0 and max at least 0. Bytes per token and head: ``D * bits / 8 + 8``.

    Args:
        bits: bits per code: 4 (SAW-INT4) or 8 (``int8fork``).
        bf16: True to round the elements to bf16 first, as SAW-INT4's kernel does after it has rotated them.
    """

    stored = (torch.float32, torch.float32)

    def __init__(self, bits: int, *, bf16: bool = False) -> None:
        self.bits, self.bf16 = bits, bf16
        super().__init__()

    def __repr__(self) -> str:
        return f"Ranged(bits={self.bits}, bf16={self.bf16})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes, scales and zero points; arguments and result: see :meth:`TokenQuantizer.encode_blocks`."""
        if self.bf16:
            x = x.bfloat16().float()
        low, high = torch.aminmax(x, dim=-1)
        if x.shape[-1].bit_count() > 1:  # the kernels' padding
            low, high = low.clamp(max=0), high.clamp(min=0)
        scale = quotient((high - low).clamp(min=1e-8), self.levels)
        zero = -low / scale
        # the kernels do not clamp; it makes no difference unless a range is tiny compared with the distance from 0
        codes = (x / scale[..., None] + zero[..., None] + 0.5).trunc().clamp(0, self.levels)
        return codes, (scale, zero)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``(code - z) * s``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        scale, zero = (param.float()[..., None] for param in params)
        return codes.float().sub_(zero).mul_(scale)


class MXBlock16(TokenQuantizer):
    """SGLang's ``fp4_mx_block16`` (KVFP4): e2m1 codes in blocks of 16 channels, each with a power of two as its scale.

    ::

        e  = ceil(log2(max(absmax / 6, 1e-10)))
        q  = e2m1(x / 2^e), ties to the larger magnitude
        x^ = e2m1(q) * 2^e

    The scale is stored as the byte ``e + 127``, which is 94 for a block of zeros. Bytes per token and head:
    ``D / 2 + D / 16`` (4.5 bits per element).
    """

    bits = 4
    group_size = 16
    stored = (torch.uint8,)

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scale bytes; arguments and result: see :meth:`TokenQuantizer.encode_blocks`."""
        exponent = torch.log2(quotient(x.abs().amax(-1), 6).clamp(min=1e-10)).ceil()
        codes = to_e2m1(x / torch.exp2(exponent)[..., None], "away")
        return torch.where(x == 0, 0, codes), ((exponent + BIAS).to(torch.uint8),)

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e2m1(code) * 2^e``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e2m1(codes).mul_(torch.exp2(params[0].float() - BIAS)[..., None])
