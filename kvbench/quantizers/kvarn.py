"""KVarN's quantizer: a tile of tokens is balanced over its tokens and channels before it is rounded.

Tokens and channels of a head differ in size by orders of magnitude. KVarN divides a tile of G tokens by a factor per
token and a factor per channel, in turn, until the standard deviations of its tokens are about equal, and those of its
channels too, in the manner of Sinkhorn and Knopp's scaling of matrices. Then it rounds asymmetrically: keys per
channel, values per token. The factor in the direction of the rounding is multiplied into scale and minimum; the other
one, the *cross* factor, is stored in addition, as fp16::

    keys:    x^[t, d] = (code[t, d] * A[d] + Z[d]) * C[t]        A, Z of each tile and channel, C of each token
    values:  x^[t, d] = (code[t, d] * A[t] + Z[t]) * C[d]        A, Z of each token, C of each tile and channel

Sources: Huawei CSL, "KVarN" (arXiv 2606.03458), and the authors' contribution to vLLM (``kvarn/sinkhorn.py``,
``kvarn_store.py``; Apache-2.0), whose order of operations this follows; ``balance="norm"``: Su et al., "OScaR"
(arXiv 2605.19660). Tiles are usually rotated by a Hadamard matrix first, which is the method's task.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError, NonFiniteError
from kvbench.quantizers.affine import FP16_MAX, AffineQuantizer, Parameter, first_non_finite
from kvbench.quantizers.spec import Axis

#: how a tile is balanced before it is rounded
Balance = Literal["kvarn", "norm", "none"]

#: standard deviations are clamped to this range before a factor takes them
DEVIATIONS = (1e-3, 1e3)
#: range of the natural logarithm of a factor
LOGARITHMS = (-0.3, 10.0)
#: smallest standard deviation that counts as a divisor in the measure of imbalance
LEAST_DEVIATION = 1e-8
#: smallest step between two codes
LEAST_STEP = 1e-10


class KvarnQuantizer(AffineQuantizer):
    """Quantizer of whole tiles of G tokens with a factor per token and a factor per channel.

    Args:
        tile: G, number of tokens of a tile, which are encoded together.
        axis: direction of the rounding. ``channel``: a channel's G tokens share a scale and a minimum (keys);
            ``token``: all channels of a token do (values).
        balance: how a tile is balanced. ``kvarn``: by alternating standard deviations; ``norm``: each token is divided
            by its norm (OScaR); ``none``: not at all, so all cross factors are 1.
        iterations: how often ``kvarn`` adapts the factors; 0: not at all, as ``none``.
        quantile: share of the largest and of the smallest elements of a row that are clipped before it is rounded; 0
            clips none.
    """

    #: name of the arithmetic for kernels
    kind = "cross"

    def __init__(
        self,
        bits: int,
        tile: int,
        axis: Axis,
        balance: Balance = "kvarn",
        iterations: int = 8,
        quantile: float = 0.0,
    ) -> None:
        super().__init__(bits, tile if axis == "channel" else None, axis)
        self.tile, self.balance, self.iterations, self.quantile = tile, balance, iterations, quantile

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(bits={self.bits}, tile={self.tile}, axis={self.axis!r}, balance={self.balance!r}, "
            f"iterations={self.iterations}, quantile={self.quantile})"
        )

    @property
    def block_tokens(self) -> int:
        """Number of tokens that are encoded together: the tile, on either axis."""
        return self.tile

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe A, Z and C, which are fp16 for every dtype of keys and values."""
        rows = Parameter(torch.float16, self.axis, self.group_size)
        across: Axis = "token" if self.axis == "channel" else "channel"
        columns = Parameter(torch.float16, across, self.tile if across == "channel" else None)
        return rows, rows, columns

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize whole tiles of keys or values, ``[..., T, D]``, without packing the codes.

        Returns:
            The codes, uint8 ``[..., T, D]``, and the parameters ``(A, Z, C)`` in fp16. For axis ``channel``, A and Z
            are ``[..., T/G, D]`` and C is ``[..., T, 1]``; for axis ``token`` it is the reverse.

        Raises:
            ConfigError: the tile does not divide T.
            NonFiniteError: `x` contains NaN or Inf.
        """
        if x.shape[-2] % self.tile:
            raise ConfigError("group_size", self.tile, f"does not divide the {x.shape[-2]} tokens to be quantized")
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
        tiles = self._rows_first(x.float().unflatten(-2, (-1, self.tile)))
        columns, rows = self.factors(tiles)
        balanced = tiles / columns / rows
        low, high = self.extremes(balanced)
        step = ((high - low) / self.whole(self.levels, low)).clamp(min=LEAST_STEP)
        codes = ((balanced - low) / step).round_().clamp_(0, self.levels)
        scale, minimum, cross = (half(p) for p in (rows * step, rows * low, columns))
        stored = (self._flat(p, row=i < 2) for i, p in enumerate((scale, minimum, cross)))
        return self._rows_first(codes).to(torch.uint8).reshape(x.shape), tuple(stored)

    def factors(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors by which the columns and the rows of tiles are divided before rounding.

        Args:
            tiles: tiles of keys ``[..., D, G]``, or of values ``[..., G, D]``, fp32; a row is rounded with one scale.

        Returns:
            The factors of the columns, ``[..., 1, columns]``, and those of the rows, ``[..., rows, 1]``.
        """
        if self.balance == "kvarn" and self.iterations:
            return balanced_factors(tiles, self.iterations)
        columns, rows = torch.ones_like(tiles[..., :1, :]), torch.ones_like(tiles[..., :1])
        if self.balance == "norm":
            tokens = -2 if self.axis == "channel" else -1  # the dimension that runs over a token's channels
            size = tiles.norm(dim=tokens, keepdim=True).clamp(min=LEAST_DEVIATION)
            return (size, rows) if self.axis == "channel" else (columns, size)
        return columns, rows

    def extremes(self, balanced: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the lowest and of the highest code of each row, ``[..., rows, 1]``.

        They are the smallest and the largest element, or with :attr:`quantile` q, the quantiles q and 1 - q.
        """
        if not self.quantile:
            low, high = balanced.aminmax(dim=-1, keepdim=True)
            return low, high
        ascending = balanced.sort(-1).values

        def at(share: float) -> Tensor:  # torch.quantile refuses tensors of more than 2**24 elements
            place = share * (balanced.shape[-1] - 1)
            first = int(place)
            return ascending[..., first : first + 1].lerp(ascending[..., first + 1 : first + 2], place - first)

        return at(self.quantile), at(1 - self.quantile)

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize the unpacked codes of whole tiles, in fp32; see :meth:`AffineQuantizer.decode`."""
        grid = codes.unflatten(-2, (-1, self.tile)).float()
        if self.axis == "channel":
            scale, minimum = (p.float().unsqueeze(-2) for p in params[:2])
            cross = params[2].float().unflatten(-2, (-1, self.tile))
        else:
            scale, minimum = (p.float().unflatten(-2, (-1, self.tile)) for p in params[:2])
            cross = params[2].float().unsqueeze(-2)
        values = grid.mul_(scale).add_(minimum).mul_(cross).flatten(-3, -2)
        return (values.clamp_(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else values).to(dtype)

    def _rows_first(self, tiles: Tensor) -> Tensor:
        """Transpose tiles ``[..., G, D]`` for axis ``channel``: a row then has one scale. A second call undoes it."""
        return tiles.transpose(-1, -2) if self.axis == "channel" else tiles

    def _flat(self, param: Tensor, row: bool) -> Tensor:
        """Reshape factors of rows ``[..., tiles, rows, 1]`` or of columns ``[..., tiles, 1, columns]`` for storage."""
        param = param.squeeze(-1 if row else -2)  # [..., tiles, D] or [..., tiles, G]
        return param if row == (self.axis == "channel") else param.flatten(-2).unsqueeze(-1)


def balanced_factors(tiles: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Find factors that balance the standard deviations of the columns and the rows of matrices, fp32.

    Each iteration multiplies the factors of the columns by the columns' standard deviations, and then those of the rows
    by the rows'. The result is the state with the least imbalance, including the initial one (all factors 1); of equal
    ones, the last. The imbalance is the largest column deviation over the smallest, plus the same of the rows.

    Returns:
        The factors of the columns, ``[..., 1, columns]``, and those of the rows, ``[..., rows, 1]``.
    """
    log_columns, log_rows = torch.zeros_like(tiles[..., :1, :]), torch.zeros_like(tiles[..., :1])
    best = (log_columns.exp(), log_rows.exp())
    current = tiles
    least = imbalance(current)
    for _ in range(iterations):
        log_columns = (log_columns + current.std(-2, keepdim=True).clamp(*DEVIATIONS).log()).clamp(*LOGARITHMS)
        current = tiles / log_columns.exp() / log_rows.exp()
        log_rows = (log_rows + current.std(-1, keepdim=True).clamp(*DEVIATIONS).log()).clamp(*LOGARITHMS)
        columns, rows = log_columns.exp(), log_rows.exp()
        current = tiles / columns / rows
        measure = imbalance(current)
        better = measure <= least
        least = torch.where(better, measure, least)
        best = (torch.where(better, columns, best[0]), torch.where(better, rows, best[1]))
    return best


def imbalance(tiles: Tensor) -> Tensor:
    """Return the largest over the smallest standard deviation of the columns, plus the same of the rows, per matrix.

    The result is ``[..., 1, 1]`` for matrices ``[..., rows, columns]``.
    """
    total = torch.zeros_like(tiles[..., :1, :1])
    for dim in (-2, -1):
        deviations = tiles.std(dim, keepdim=True)
        least = deviations.amin((-2, -1), keepdim=True).clamp(min=LEAST_DEVIATION)
        total = total + deviations.amax((-2, -1), keepdim=True) / least
    return total


def half(param: Tensor) -> Tensor:
    """Round parameters to fp16; numbers beyond its range become its largest number."""
    return param.clamp(-FP16_MAX, FP16_MAX).half()
