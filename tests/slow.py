"""Slow, obvious statements of the methods on whole tensors, written from the papers' formulas and not from kvbench."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def affine(block: Tensor, bits: int) -> Tensor:
    """Asymmetric quantization and back; the last dimension is the group (KIVI, sec. 3)."""
    low, high = block.amin(-1, keepdim=True), block.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return torch.round(((block - low) / scale).clamp(0, 2**bits - 1)) * scale + low


def atom(block: Tensor, bits: int) -> Tensor:
    """Atom's quantization and back: integer zero point clamped to the code range."""
    low, high = block.amin(-1, keepdim=True), block.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-5) / (2**bits - 1)
    zero = torch.round(-low / scale).clamp(0, 2**bits - 1)
    return ((torch.round(block / scale) + zero).clamp(0, 2**bits - 1) - zero) * scale


def nearest(x: Tensor, scale: Tensor, offset: Tensor, levels: Tensor) -> Tensor:
    """The level nearest to the normalised value, and back; the first of equally near ones."""
    return levels[((x - offset) / scale)[..., None].sub(levels).abs().argmin(-1)] * scale + offset


def kvquant_keys(x: Tensor, thresholds: Tensor, levels: Tensor, outliers: bool) -> Tensor:
    """KVQuant's keys before RoPE ``[T, C]``: what lies outside of its channel's thresholds ``[2, C]`` stays."""
    upper, lower = thresholds.half()
    coded = nearest(x, ((upper - lower) / 2).float(), ((upper + lower) / 2).float(), levels)
    return torch.where((x < lower) | (x > upper), x, coded) if outliers else coded


def kvquant_values(x: Tensor, levels: Tensor, share: float) -> Tensor:
    """KVQuant's values ``[T, C]``: of each token the two tails stay, the rest has one range."""
    out = x.clone()
    for t, row in enumerate(x):
        kept = torch.zeros_like(row, dtype=torch.bool)
        if share:
            kept = (row >= torch.quantile(row, 1 - share / 2)) | (row <= torch.quantile(row, share / 2))
        rest = row[~kept]
        coded = nearest(row, (rest.max() - rest.min()) / 2, (rest.max() + rest.min()) / 2, levels)
        out[t] = torch.where(kept, row, coded)
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal softmax attention of the newest tokens, ``[B, Hq, q, D]`` over ``[B, H, T, D]`` -> ``[B, q, Hq, D]``."""
    group, count = query.shape[1] // keys.shape[1], query.shape[2]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = query @ keys.transpose(-1, -2) * scaling
    scores[..., -count:] += torch.full((count, count), -math.inf).triu(1)
    return (torch.softmax(scores, -1) @ values).transpose(1, 2)


def kivi_past(
    keys: Tensor, values: Tensor, *, bits: int, group: int, residual: int, sinks: int = 0, key_axis: str = "channel"
) -> tuple[Tensor, Tensor]:
    """KIVI's contents of a past ``[B, H, T, D]``, dequantized; groups of `group` tokens and of `group` channels."""
    n = max(keys.shape[2] - sinks, 0)
    keys, values = keys.clone(), values.clone()
    for first in range(sinks, sinks + n - n % residual, group):
        block = keys[:, :, first : first + group]
        if key_axis == "channel":
            block = affine(block.transpose(-1, -2), bits).transpose(-1, -2)
        else:
            block = affine(block.unflatten(-1, (-1, group)), bits).flatten(-2)
        keys[:, :, first : first + group] = block
    for token in range(sinks, sinks + max(0, n - residual)):
        values[:, :, token] = affine(values[:, :, token].unflatten(-1, (-1, group)), bits).flatten(-2)
    return keys, values


def levels(x: Tensor) -> int:
    """Most distinct values in any group (last dimension)."""
    return max(len(group.unique()) for group in x.reshape(-1, x.shape[-1]))
