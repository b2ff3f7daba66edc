"""The part of the Triton kernel that reads tokens in full precision: one program's share of such a phase."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvbench.attention.codebook.triton.parts import angles, clamped, product, run, softened, turned_back
from kvbench.attention.triton.merge import NOTHING


@triton.jit
def exact_tokens(
    key_ptr, value_ptr, fine_ptr, coarse_ptr, q_at, normal, factor, cap, near, begin, slot, count, first, last, cell,
    room, key_at, value_at, top, total, acc,
    KEY_BITS: tl.constexpr, ROTATE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the running softmax after some tokens of a phase in full precision, as `top`, `total` and `acc`.

    Arguments are those of :func:`kvbench.attention.codebook.triton.packed.packed_tiles`, and:

    * ``key_ptr``: pointer to the buffer of keys.
    * ``value_ptr``: pointer to the buffer of values.
    * ``first``: first run of N tokens of the program.
    * ``last``: one past its last run.
    * ``room``: tokens of a head in the buffers.
    * ``key_at``: index of the phase's first token in the buffer of keys.
    * ``value_at``: the same for values.
    """
    HALF: tl.constexpr = KEY_DIM // 2
    N: tl.constexpr = run(KEY_BITS)
    col = tl.arange(0, BLOCK_ROWS)
    valid = col < ROWS
    row = tl.arange(0, N)
    d = tl.arange(0, VALUE_DIM)
    keys = key_ptr + cell.to(tl.int64) * room * KEY_DIM
    values_ptr = value_ptr + cell.to(tl.int64) * room * VALUE_DIM
    for u in tl.range(first, last, num_stages=1):
        number = u * N + row
        inside = tl.minimum(number, count - 1)
        result = tl.zeros((N, BLOCK_ROWS), tl.float32)
        for k in tl.range(0, HALF, CHUNK, num_stages=1):
            source = keys + (key_at + inside)[:, None] * KEY_DIM + (k + tl.arange(0, CHUNK))[None, :]
            a = tl.load(source).to(tl.float32)
            b = tl.load(source + HALF).to(tl.float32)
            one = tl.load(q_at + k).to(tl.float32) * normal[None, :]
            other = tl.load(q_at + HALF + k).to(tl.float32) * normal[None, :]
            if ROTATE:
                turn_cos, turn_sin = angles(fine_ptr, coarse_ptr, begin + slot + u * N, KEY_DIM, k, CHUNK)
                key_query, other_query = turned_back(one, other, turn_cos[:, None], turn_sin[:, None])
                near_cos = tl.load(near + k).to(tl.float32)
                near_sin = tl.load(near + HALF + k).to(tl.float32)
                key_first = clamped(a * near_cos - b * near_sin)
                key_second = clamped(b * near_cos + a * near_sin)
            else:
                key_query = one.to(tl.float16)
                other_query = other.to(tl.float16)
                key_first = clamped(a)
                key_second = clamped(b)
            result += product(key_first, key_query, ASM) + product(key_second, other_query, ASM)
        result = softened(result * factor[None, :], cap, CAPPED)
        seen = (number < count)[:, None] & (valid | (ROWS > 1))[None, :]
        result = tl.where(seen, result, NOTHING)
        higher = tl.maximum(top, tl.max(result, 0))
        lowering = tl.exp2(top - higher)
        top = higher
        amount = tl.where(result > NOTHING, tl.exp2(result - top[None, :]), 0.0)
        total = total * lowering + tl.sum(amount, 0)
        x = tl.load(values_ptr + (value_at + inside)[None, :] * VALUE_DIM + d[:, None])
        sum_here = product(clamped(x.to(tl.float32)), (amount * 16384.0).to(tl.float16), ASM)
        acc = acc * lowering[None, :] + sum_here * (1.0 / 16384.0)
    return top, total, acc
