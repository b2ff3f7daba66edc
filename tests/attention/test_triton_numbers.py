"""Range of numbers that the Triton decode kernel survives, and the PTX that only a GPU runs."""

import math
import re

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention.phases import Format  # noqa: E402
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error  # noqa: E402
from kvbench.attention.triton import codes as triton_codes  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402

TOLERANCE = 3e-3


def channel(bits, group, kind="affine"):
    return Format(kind, bits, "channel", group)


def token(bits, group, kind="affine"):
    return Format(kind, bits, "token", group)


def extremes(key, value, scale_k, scale_v, size, dtype=torch.float16):
    work = layer(
        [Piece(key, [256]), Piece(FULL, [9])], [Piece(value, [256]), Piece(FULL, [9])],
        heads=1, key_dim=64, value_dim=64, dtype=dtype,
    )  # fmt: skip
    for held, scale in ((work.phases[0][0], scale_k), (work.phases[0][1], scale_v)):
        step, second = held.params
        step[:, :, : step.shape[2] // 2] = 0  # constant groups
        if scale:
            step[..., -1] = scale  # one outlier channel, or the last group of each token
            second[..., -1] = 0.0 if scale > 5e3 else -scale
    query = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(0)) * size
    return work, query.to(dtype)


@pytest.mark.parametrize("kind", ["affine", "hierarchical"])
@pytest.mark.parametrize(("scale_k", "scale_v", "size"), [(6e4, 3e3, 1e3), (0, 0, 1e3), (6e4, 0, 1e-3), (1e-7, 4e3, 1)])
def test_range_is_guarded(kind, scale_k, scale_v, size):
    """Scales up to 6e4, queries up to 1e3, constant groups, an outlier channel: finite, and right where fp32 is."""
    bits = 8 if kind == "hierarchical" else 4
    work, query = extremes(channel(bits, 128, kind), token(bits, 64, kind), scale_k, scale_v, size)
    wanted = dequantized_attention(query, work, 0.125)
    found = triton_decode.attend(query, work, 0.125)
    assert torch.isfinite(found).all()
    assert relative_error(found, wanted.clamp(-65504, 65504)) < TOLERANCE


def test_range_of_scales_per_token():
    for key in (token(4, 64), token(4, 32, "atom")):
        work, query = extremes(key, token(4, 32, key.kind), 6e4, 4e3, 1e3)
        found = triton_decode.attend(query, work, 0.125)
        assert torch.isfinite(found).all()
        assert relative_error(found, dequantized_attention(query, work, 0.125).clamp(-65504, 65504)) < TOLERANCE


def test_weights_of_bf16_values_keep_more_than_their_8_bits():
    """Pairs of opposite values with almost equal weights: their sum is as small as a bf16 weight's rounding error."""
    work = layer([Piece(FULL, [64])], [Piece(FULL, [64])], heads=1, key_dim=64, value_dim=64, dtype=torch.bfloat16)
    values = work.phases[0][1].buffer
    values[:, :, 32:64] = -values[:, :, :32]
    query = (torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(0)) * 0.01).bfloat16()
    found = triton_decode.attend(query, work, 0.125)
    assert relative_error(found, dequantized_attention(query, work, 0.125)) < 6e-3


def ptx(text, inputs):
    """Return the value of $0 that the few instructions of `text` compute from 32-bit inputs $1, $2, ...."""
    registers = {f"${i + 1}": value for i, value in enumerate(inputs)}

    def value(operand):
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", text).split(";"):
        if not line.strip():
            continue
        name, target, *operands = re.split(r"[,\s]+", line.strip())
        a = [value(operand) for operand in operands]
        if name == "lop3.b32":
            bits = [a[3] >> (4 * (a[0] >> i & 1) + 2 * (a[1] >> i & 1) + (a[2] >> i & 1)) & 1 for i in range(32)]
            result = sum(bit << i for i, bit in enumerate(bits))
        elif name == "prmt.b32":
            both = (a[1] << 32 | a[0]).to_bytes(8, "little")
            result = int.from_bytes(bytes(both[a[2] >> 4 * i & 7] for i in range(4)), "little")
        else:
            operation = {"and.b32": a[0] & a[-1], "or.b32": a[0] | a[-1], "shr.b32": a[0] >> min(a[-1], 32)}
            result = a[0] << a[-1] if name == "shl.b32" else operation[name]
        registers[target] = result & 0xFFFFFFFF
    return registers["$0"]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_ptx_gives_the_codes_of_the_layout(bits):
    """The instructions that only a GPU runs, emulated: field i of two words, as fp16 bits."""
    once = {2: triton_codes.ASM2, 4: triton_codes.ASM4, 8: triton_codes.ASM8}[bits].value
    looped = {2: triton_codes.ASM_AT2, 4: triton_codes.ASM_AT4, 8: triton_codes.ASM_AT8}[bits].value
    form, width = triton_codes.format_number("affine", bits), min(bits, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        planes = torch.randint(0, 2**32, (2 if bits == 8 else 1,), generator=generator).tolist()
        for i in range(16 // width):
            codes = []
            for half in (0, 16):
                code = 0
                for plane in planes:
                    code = code << 4 | plane >> half + i * width & (1 << width) - 1
                codes.append(code)
            lift = round(math.log2(triton_codes.lift.fn(form, i)))
            assert ptx(once[i], planes) == sum(code << (24 - lift) << 16 * n for n, code in enumerate(codes))
            shift = i * width | i * width << 16
            assert ptx(looped, [*planes, shift]) == codes[0] | codes[1] << 16
