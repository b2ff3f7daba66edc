"""Packing of TurboQuant's tokens by a kernel, in Triton's interpreter: bit for bit what the quantizers write."""

import pytest
import torch

from tests.cache.packing import both, interpret, interpreted, new, same, special, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import engine  # noqa: E402
from kvbench.quantizers.engine.vllm import Fp8  # noqa: E402
from kvbench.quantizers.turboquant import LevelQuantizer, SketchQuantizer, TruncatingQuantizer  # noqa: E402

ALL = slice(None)
FORMATS = [
    (LevelQuantizer(4), "key"),
    (LevelQuantizer(3, "write"), "key"),
    (LevelQuantizer(3), "key"),
    (TruncatingQuantizer(4), "value"),
    (TruncatingQuantizer(3), "value"),
]


@pytest.mark.parametrize(("quantizer", "side"), FORMATS, ids=str)
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(quantizer, side):
    """Some tokens, one token alone, and tokens across the border of a tile."""
    both(quantizer, side, [special(12, 64, torch.bfloat16), *(tokens(n, 64, torch.bfloat16, n) for n in (1, 118))])


@pytest.mark.parametrize(("quantizer", "side"), FORMATS[1:5:3], ids=str)
def test_fp16_tokens_of_several_rows_and_heads_of_96_channels(quantizer, side):
    both(quantizer, side, [tokens(5, 96, torch.float16, 1, batch=2, heads=2)])


@pytest.mark.parametrize("channels", [80, 256])
@pytest.mark.parametrize(("quantizer", "side"), FORMATS[:1] + FORMATS[4:], ids=str)
@pytest.mark.slow  # 4 s
def test_heads_of_80_and_256_channels(quantizer, side, channels):
    both(quantizer, side, [tokens(3, channels, torch.bfloat16, 1)])


@pytest.mark.parametrize(
    ("key", "value"), [(LevelQuantizer(3), TruncatingQuantizer(3)), (Fp8(), TruncatingQuantizer(4))]
)
def test_the_token_of_a_captured_step_is_packed_at_places_on_the_device(key, value):
    x = tokens(18, 64, torch.bfloat16, batch=2, heads=2)
    wanted = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    computed = [new(quantizer, side, x) for quantizer, side in ((key, "key"), (value, "value"))]
    for segment in wanted:
        segment.append(ALL, x)
    for segment in computed:
        segment.append(ALL, x[:, :, :17])
        segment.advance()
    engine.pack_engine_tokens(*computed, x[:, :, 17:], x[:, :, 17:], torch.full((2, 2), 17, dtype=torch.int32))
    for done, alike in zip(computed, wanted, strict=True):
        same(done, alike)
    assert engine.engine_refusal(*computed) is None
    assert "SketchQuantizer" in engine.engine_refusal(new(SketchQuantizer(3), "key", x), computed[1])


@pytest.mark.parametrize("sign", [1, -1])
def test_minima_beyond_the_range_of_fp16_are_its_largest_number(sign):
    x = (1e5 + 10 * tokens(2, 64, torch.float32)) * sign
    both(TruncatingQuantizer(4), "value", [x.bfloat16()])


def test_the_kernel_of_levels_gets_the_borders_between_levels_and_the_levels():
    """A table of 2 ** bits - 1 borders, then 2 ** bits levels; codes of 3 bits are packed in pairs of word rows."""
    for bits in (3, 4):
        form, table = engine.kernel_form(LevelQuantizer(bits), 64), LevelQuantizer(bits).table(64)
        count = 2**bits
        assert len(form.table) == 2 * count - 1 and form.table[count - 1 :] == tuple(table.sort().values.tolist())
        assert form.table[: count - 1] == pytest.approx(
            ((table.sort().values[1:] + table.sort().values[:-1]) / 2).tolist()
        )
        assert (form.rows, form.parts) == ((2, 8) if bits == 3 else (8, 4))
    assert engine.rule(LevelQuantizer(3, "write")) == "levels_write" and engine.rule(LevelQuantizer(3)) == "levels"
    assert engine.rule(TruncatingQuantizer(4)) == "grid" and engine.kernel_form(TruncatingQuantizer(4), 64).table == ()
