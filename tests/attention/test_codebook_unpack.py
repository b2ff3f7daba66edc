"""The PTX that looks up levels, executed in Python: the interpreter of Triton runs plain operations in its place."""

from __future__ import annotations

import re

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kvbench.attention.codebook.triton.unpack import ptx, table  # noqa: E402
from kvbench.cache.segments.layout import TileLayout  # noqa: E402
from kvbench.quantizers.packing import PLANES, split_planes  # noqa: E402


@triton.jit
def registers(levels, out, BITS: tl.constexpr):
    values = table(levels, BITS)
    for i in tl.static_range(len(values)):
        tl.store(out + i, values[i])


def permuted(a: int, b: int, selector: int) -> int:
    """``prmt.b32``; no selector may ask for a sign."""
    pool = a | b << 32
    picks = [selector >> 4 * i & 15 for i in range(4)]
    assert max(picks) < 8
    return sum((pool >> 8 * pick & 255) << 8 * i for i, pick in enumerate(picks))


def executed(code: str, operands: dict[str, int]) -> dict[str, int]:
    """Execute PTX on 32-bit registers, the operands `$0`, `$1`, ... among them."""
    state = dict(operands)
    lines = [line.strip() for line in code.strip("{} ").split(";")][1:]
    operations = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "shl": lambda a, b: a << b & 0xFFFFFFFF,
        "shr": lambda a, b: a >> b,
        "mov": lambda a: a,
        "prmt": lambda a, b, selector: permuted(a, b, selector & 0xFFFF),
        "lop3": lambda a, b, c, lut: chosen(a, b, c, lut),
    }
    for line in filter(None, lines):
        name, to, rest = re.fullmatch(r"(\w+)\.b32 (\$?\w+), (.*)", line).groups()  # type: ignore[union-attr]
        given = [state[x] if x in state else int(x, 0) for x in rest.split(", ")]
        state[to] = operations[name](*given)
    return state


def chosen(a: int, b: int, c: int, lut: int) -> int:
    assert lut == 0xCA
    return a & b | ~a & c & 0xFFFFFFFF


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_ptx_looks_up_the_levels_of_all_codes(bits: int) -> None:
    levels = torch.linspace(-1.3, 1.9, 2**bits).half().float()
    lookup = torch.zeros(16, dtype=torch.int32)
    registers[(1,)](levels, lookup, bits)
    codes = torch.randint(0, 2**bits, (128, 2), generator=torch.Generator().manual_seed(0))
    planes = [
        TileLayout(width, "key").pack(plane)[0]
        for width, plane in zip(PLANES[bits], split_planes(codes, bits), strict=True)
    ]
    fields, rows = (4, 32) if bits == 4 else (8, 16)
    code, constraints = ptx(bits)
    count = constraints.count("=r")
    tables = [int(x) & 0xFFFFFFFF for x in lookup][: 2 * (2**bits // 4)]
    for row in range(rows):
        words = [word_pair(planes[0][row])]
        if bits == 3:  # the plane of single bits has 8 rows, the second half of whose fields is shifted
            words += [word_pair(planes[1][row % 8]), row // 8 * 0x10001]
        given = words + [x for x in tables for _ in (0, 1)]
        operands = {f"${count + i}": x for i, x in enumerate(given)}
        state = executed(code, operands)
        for field in range(fields):
            pair = torch.tensor([state[f"${field}"] & 0xFFFF, state[f"${field}"] >> 16]).to(torch.int16)
            assert torch.equal(pair.view(torch.float16).float(), levels[codes[field * rows + row]])


def word_pair(words: torch.Tensor) -> int:
    """Two neighbouring words as the register that holds them."""
    return (int(words[0]) & 0xFFFF) | (int(words[1]) & 0xFFFF) << 16
