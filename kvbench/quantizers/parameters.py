"""Descriptions of the tensors that a quantizer stores in addition to its codes, such as scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.quantizers.spec import Axis


@dataclass(frozen=True)
class Parameter:
    """One of the tensors that hold the parameters of groups, for tokens ``[..., T, D]``.

    Args:
        axis: ``token``: a group is `group` channels of one token, and the tensor is ``[..., T, D / group]``.
            ``channel``: a group is `group` tokens of one channel, and the tensor is ``[..., T / group, D]``.
        group: number of elements per group; None (axis ``token`` only) means all channels of a head.
        window: 0, or the number of tokens that are divided into as few groups of at most `group` tokens as possible
            (axis ``channel`` only; :class:`kvbench.quantizers.windowed.WindowedQuantizer`).
        padding: number of unused elements at the end of each row, if the original layout aligns rows (axis ``token``
            only). They are counted as stored.
    """

    dtype: torch.dtype
    axis: Axis = "token"
    group: int | None = None
    window: int = 0
    padding: int = 0

    @property
    def block_tokens(self) -> int:
        """Smallest number of tokens that have rows of their own in the tensor."""
        if self.axis == "token":
            return 1
        return self.window or self.group or 1

    @property
    def block_rows(self) -> int:
        """Number of rows of the tensor that belong to :attr:`block_tokens` tokens."""
        return -(-self.window // (self.group or self.window)) if self.window else 1

    def row(self, token: int) -> int:
        """Return the first row of the block that begins with a token, a multiple of :attr:`block_tokens`."""
        return token // self.block_tokens * self.block_rows

    def shape(self, tokens: int, channels: int) -> tuple[int, int]:
        """Return the last two dimensions of the tensor for tokens ``[..., T, D]``; only whole blocks count."""
        if self.axis == "channel":
            return self.row(tokens), channels
        return tokens, channels // (self.group or channels) + self.padding

    def nbytes(self, tokens: int, channels: int) -> int:
        """Return the number of bytes of the tensor for one row and one KV head; only whole blocks of tokens count."""
        rows, width = self.shape(tokens, channels)
        return rows * width * self.dtype.itemsize
