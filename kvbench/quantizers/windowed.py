"""Per-channel quantization of blocks of W tokens, which are divided into nearly equal groups.

LogQuant quantizes W tokens at a time (paper, Algorithm 1), and W need not be a multiple of a group size (128 // 3 = 42,
256 // 3 = 85). So a block is divided into ``ceil(W / most)`` groups whose sizes differ by at most one token, where
``most`` is the largest allowed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.quantizers.affine import AffineQuantizer, Parameter, param_dtype


class WindowedQuantizer(AffineQuantizer):
    """LogQuant's quantizer for blocks of W tokens, in nearly equal groups per channel.

    Args:
        window: W, the number of tokens per block; only whole blocks can be encoded and decoded.
        most: largest number of tokens per group.
    """

    def __init__(self, bits: int, window: int, most: int = 64) -> None:
        self.groups = -(-window // most)
        self.window = window
        super().__init__(bits, -(-window // self.groups), "channel")
        assert self.group_size is not None
        # token of the block -> place in [groups, group_size]; shorter groups repeat their last token
        sizes = [window // self.groups + (g < window % self.groups) for g in range(self.groups)]
        first, spread = 0, []
        for size in sizes:
            spread += [first + min(i, size - 1) for i in range(self.group_size)]
            first += size
        self.spread = spread
        self.places = [g * self.group_size + i for g in range(self.groups) for i in range(sizes[g])]
        self.even = window == self.groups * self.group_size

    @property
    def block_tokens(self) -> int:
        """W, the number of tokens that must be encoded or decoded together."""
        return self.window

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the tensors of scales and minima: one row per group, a fixed number of groups per block."""
        parameter = Parameter(param_dtype(dtype), "channel", self.group_size, self.window)
        return (parameter, parameter)

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize k blocks of W tokens, ``[..., k W, D]``, without packing the codes.

        Returns:
            The codes, uint8 ``[..., k W, D]``, and ``(scale, minimum)``, each ``[..., k * groups, D]``.
        """
        if self.even:
            return super().encode(x)
        codes, params = super().encode(self._gather(x, self.window, self.spread))
        return self._gather(codes, len(self.spread), self.places), params

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize k blocks of W tokens, ``[..., k W, D]``; see :meth:`AffineQuantizer.decode`."""
        if self.even:
            return super().decode(codes, params, dtype)
        values = super().decode(self._gather(codes, self.window, self.spread), params, dtype)
        return self._gather(values, len(self.spread), self.places)

    @staticmethod
    def _gather(x: Tensor, block: int, index: list[int]) -> Tensor:
        """Reorder the tokens of each block of `block` tokens by `index`, which may repeat or omit tokens."""
        blocks = x.unflatten(-2, (-1, block))
        return blocks.index_select(-2, torch.tensor(index, device=x.device)).flatten(-3, -2)
