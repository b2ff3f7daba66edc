"""Tables of TurboQuant's levels for the CUDA kernel, against the levels themselves."""

import pytest
import torch

from kvbench.attention.cuda.config import build, shared_memory
from kvbench.attention.cuda.levels import table
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL
from kvbench.quantizers.turboquant import LevelQuantizer


def entries(words):
    """The eight fp16 numbers and the eight squares of a table."""
    stream = b"".join(word.to_bytes(4, "little") for word in words)
    halves = torch.tensor([stream[i] | stream[8 + i] << 8 for i in range(8)], dtype=torch.int32)
    return halves.to(torch.int16).view(torch.float16).double(), torch.tensor(list(stream[16:]))


def entry_of(codes, bits):
    """Number of the entry that the kernel looks up for a stored code."""
    return codes & 7 if bits == 4 else codes >> 1 | (codes & 1) << 2


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_entries_are_levels_nearly_exactly(bits, channels):
    made = table(channels, bits)
    numbers, _ = entries(made.words)
    codes = torch.arange(8)
    wanted = LevelQuantizer(bits).table(channels)[codes].double()
    assert torch.allclose(numbers[entry_of(codes, bits)] * made.unit, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [3, 4])
def test_sums_of_squares_yield_the_length_of_a_tokens_levels(bits):
    made, quantizer = table(128, bits), LevelQuantizer(bits)
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    codes = quantizer.encode(x)[0].long()
    _, squares = entries(made.words)
    sums = squares[entry_of(codes, bits)].sum(-1, keepdim=True).double()
    ratio = made.read_unit / made.unit / sums.sqrt() * quantizer.length(codes)
    assert float((ratio - 1).abs().max()) < 2e-3 and float((ratio - 1).square().mean().sqrt()) < 4e-4


def test_kernels_for_levels_have_eight_warps_and_only_the_tables_that_they_need():
    key, value = Format("levels_read", 3, "token", 128), Format("affine", 3, "token", 128)
    made = build(((key, value), (FULL, FULL)), 128, 1, True, shared_memory((9, 0)))
    assert (made.team, made.teams, made.resident) == (1, 8, 1)
    macros = made.macros()
    assert f"{table(128, 3).words[0]:#x}u" in macros and "{0x0u, 0x0u, 0x0u, 0x0u, 0x0u, 0x0u}" in macros
    plain = build(((FULL, FULL),), 128, 1, True, shared_memory((9, 0)))
    assert "LEVEL_BYTES" not in plain.macros()
