"""NVFP4: e2m1 codes in blocks of 16 channels, each block with an e4m3 scale, and one fp32 factor for the whole tensor.

Sources: vllm-project/vllm, ``nvfp4_kv_cache_kernels.cu`` (c46deb95), and for 4over6 vLLM's pull request 45187 and
flashinfer-ai/flashinfer, ``quantization_utils.cuh`` (fb28d724) with mean squared errors; all Apache-2.0. Their kernels
use an approximate reciprocal, so a few of their scale bytes may differ by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.engine.base import TokenQuantizer
from kvbench.quantizers.engine.floats import from_e2m1, from_e4m3, to_e2m1, to_e4m3

#: channels per block
BLOCK = 16


class NVFP4(TokenQuantizer):
    """NVFP4 in caches of vLLM, SGLang and TensorRT-LLM.

    With a factor g for all keys, or all values, of a layer (1 unless it is calibrated)::

        s  = e4m3(absmax * (1 / 6) / g)
        q  = e2m1(x / (s * g)), ties to the even code
        x^ = e2m1(q) * s * g

    With g = 1, blocks with elements above 2688 saturate, and blocks whose scale is rounded to 0 are stored as zeros.
    Bytes per token and head: ``D / 2 + D / 16`` (4.5 bits per element).

    Args:
        factor: g.
        four: True for ``4over6``: a second candidate scale maps the largest element to 4 instead of 6. It is used in
            the blocks where its squared error is strictly smaller.
    """

    kind = "float"
    bits = 4
    group_size = BLOCK
    stored = (torch.uint8,)

    def __init__(self, factor: float = 1.0, *, four: bool = False) -> None:
        super().__init__()
        self.factor, self.four = factor, four

    def __repr__(self) -> str:
        return f"NVFP4(factor={self.factor}, four={self.four})"

    def encode_blocks(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and scales; arguments and result are those of :meth:`TokenQuantizer.encode_blocks`."""
        factor = torch.full((), self.factor, dtype=torch.float32, device=x.device)
        sixth = torch.full((), 1 / 6, dtype=torch.float32, device=x.device)
        wanted = x.abs().amax(-1) * sixth / factor
        scale, codes = to_e4m3(wanted), None
        codes = self._codes(x, scale, factor)
        if self.four:
            other = to_e4m3(wanted * 1.5)
            rival = self._codes(x, other, factor)
            better = self._error(x, rival, other) < self._error(x, codes, scale)
            scale, codes = torch.where(better, other, scale), torch.where(better[..., None], rival, codes)
        return codes, (scale,)

    def _codes(self, x: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        """Return the codes of blocks with given scale bytes; 0 where the scale is 0."""
        step = (from_e4m3(scale) * factor)[..., None]
        return torch.where(step == 0, 0, to_e2m1(x * (1 / step), "even"))

    def _error(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the squared error of each block, added up from its first to its last element."""
        square = (x - self.decode_blocks(codes, (scale,))).square()
        total = torch.zeros_like(square[..., 0])
        for i in range(square.shape[-1]):
            total = total + square[..., i]
        return total

    def decode_blocks(self, codes: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """Return ``e2m1(code) * s * g``; arguments are those of :meth:`TokenQuantizer.decode_blocks`."""
        return from_e2m1(codes).mul_(from_e4m3(params[0])[..., None]).mul_(self.factor)
