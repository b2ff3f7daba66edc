"""Order statistics inside a Triton kernel: elements of given ranks among 16-bit floating-point numbers, by histograms.

A number's *sort key* is an integer, 0 to 65535, that sorts like it. A histogram of the upper bytes tells in which bin
an element lies, and one of the lower bytes of that bin's elements which of them it is. Ranks count from 0 for the
smallest element; padding has the largest key, 65535.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number_of(key, BF16: tl.constexpr):
    """Return the number, fp32, that has a sort key: the inverse of :func:`sort_key`."""
    bits = tl.where(key >= 32768, key - 32768, 65535 - key)
    if BF16:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def sort_key(x):
    """Return the sort keys, int32, of fp16 or bf16 numbers."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return tl.where(bits >= 32768, 65535 - bits, bits + 32768)


@triton.jit
def at_rank(counts, rank):
    """Return in which bin the element of a rank is, and its rank within the bin, given the bins' counts, ``[256]``."""
    upto = tl.cumsum(counts, 0)
    before = upto <= rank
    return tl.sum(before.to(tl.int32), 0), rank - tl.max(tl.where(before, upto, 0), 0)


@triton.jit
def within_bin(keys, byte, rank):
    """Return the sort key of the element of a rank among those whose upper byte is `byte`."""
    # all other elements count as the largest of the bin, and so come after those of any rank in it
    low, _ = at_rank(tl.histogram(tl.where(keys >> 8 == byte, keys & 255, 255), 256), rank)
    return byte * 256 + low


@triton.jit
def statistics(keys, first, second, third, COUNT: tl.constexpr):
    """Return the elements of three ranks as sort keys."""
    keys = tl.reshape(keys, (COUNT,))
    counts = tl.histogram(keys >> 8, 256)
    a, a_rank = at_rank(counts, first)
    b, b_rank = at_rank(counts, second)
    c, c_rank = at_rank(counts, third)
    return within_bin(keys, a, a_rank), within_bin(keys, b, b_rank), within_bin(keys, c, c_rank)


@triton.jit
def following(keys, key, rank):
    """Return the sort key of the element of the next rank, where `key` is that of the rank."""
    upto = tl.sum(tl.sum((keys <= key).to(tl.int32), 1), 0)
    above = tl.min(tl.min(tl.where(keys > key, keys, 65536), 1), 0)
    return tl.where(upto > rank + 1, key, tl.minimum(above, 65535))


@triton.jit
def between(low, high, weight):
    """Interpolate linearly between two numbers, as ``torch.lerp`` does."""
    return tl.where(weight < 0.5, low + weight * (high - low), high - (high - low) * (1.0 - weight))
