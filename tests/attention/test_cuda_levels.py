"""Tables of TurboQuant's levels for the CUDA kernel, against the levels themselves."""

import pytest
import torch

from kvbench.attention.cuda.config import build, shared_memory
from kvbench.attention.cuda.storage import byte_table, codebook_levels
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL
from kvbench.quantizers.turboquant import LevelQuantizer


def entries(words):
    """The eight fp16 numbers of a table."""
    stream = b"".join(word.to_bytes(4, "little") for word in words)
    halves = torch.tensor([stream[i] | stream[8 + i] << 8 for i in range(8)], dtype=torch.int32)
    return halves.to(torch.int16).view(torch.float16).double()


def entry_of(codes, bits):
    """Number of the entry that the kernel looks up for a stored code."""
    return codes & 7 if bits == 4 else codes >> 1 | (codes & 1) << 2


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_entries_are_levels_nearly_exactly(bits, channels):
    made = codebook_levels(channels, bits)
    numbers = entries(made.words)
    codes = torch.arange(8)
    wanted = LevelQuantizer(bits).table(channels)[codes].double()
    assert torch.allclose(numbers[entry_of(codes, bits)] * made.unit, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("channels", [64, 128])
def test_bytes_yield_levels_and_their_length(channels):
    made, quantizer = byte_table(channels), LevelQuantizer(3)
    stream = torch.tensor(list(b"".join(word.to_bytes(4, "little") for word in made.words))).double()
    x = torch.randn(500, channels, generator=torch.Generator().manual_seed(0))
    codes = quantizer.encode(x)[0].long()
    multiples = stream[entry_of(codes, 3)] - 127.5
    wanted = quantizer.table(channels)[codes].double()
    assert float((multiples * made.unit - wanted).norm() / wanted.norm()) < 8e-4
    lengths = stream[8 + entry_of(codes, 3)].sum(-1, keepdim=True).sqrt()
    normalised = multiples * made.read_unit / lengths
    assert float((normalised - wanted / quantizer.length(codes)).norm() / normalised.norm()) < 1e-3


@pytest.mark.parametrize(("rows", "softcap", "number"), [(1, True, 1), (4, False, 4), (5, False, 0)])
def test_integers_multiply_levels_of_up_to_four_rows(rows, softcap, number):
    key, value = Format("levels_read", 3, "token", 128), Format("affine", 3, "token", 128)
    made = build(((key, value), (FULL, FULL)), 128, rows, True, shared_memory((9, 0)), softcap=softcap)
    assert made.integer == number and (made.digits > 0) == (number > 0)
    slow = build(((key, value),), 128, rows, True, shared_memory((9, 0)), fast_integers=False)
    assert slow.integer == slow.digits == 0
    codes = (Format("affine", 2, "channel", 32), Format("affine", 2, "token", 32))
    mixed = build(((key, value), codes, (FULL, FULL)), 128, 1, True, shared_memory((9, 0)), softcap=softcap)
    assert mixed.integer == (not softcap)  # codes of 2 bits are not multiplied as integers under a softcap
    half = build(((key, value), (FULL, FULL)), 128, rows, False, shared_memory((9, 0)), softcap=softcap)
    assert half.integer == half.digits == 0  # fp16 rounds less than bytes do


@pytest.mark.parametrize(("bits", "warps"), [(3, 8), (4, 16)])
def test_kernels_for_levels_have_8_or_16_warps(bits, warps):
    key, value = Format("levels_read", bits, "token", 128), Format("affine", bits, "token", 128)
    assert build(((key, value), (FULL, FULL)), 128, 4, True, shared_memory((9, 0))).warps == warps


def test_kernels_for_levels_have_only_the_tables_that_they_need():
    key, value = Format("levels_read", 3, "token", 128), Format("affine", 3, "token", 128)
    made = build(((key, value), (FULL, FULL)), 128, 1, True, shared_memory((9, 0)))
    macros = made.macros()
    assert f"{codebook_levels(128, 3).words[0]:#x}u" in macros and "{0x0u, 0x0u, 0x0u, 0x0u}" in macros
    plain = build(((FULL, FULL),), 128, 1, True, shared_memory((9, 0)))
    assert "LEVEL_BYTES" not in plain.macros()
