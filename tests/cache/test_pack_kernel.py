"""Quantize and pack in one kernel, in Triton's interpreter: bit for bit what the quantizers and the layout write."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.packing import interpret, interpreted, same, tokens  # noqa: F401
from tests.marks import fast

interpreted()

from kvbench.cache.kernels import pack  # noqa: E402
from kvbench.cache.kernels.jobs import Form, programs, word_rows  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.segments import packed  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers import AffineQuantizer, AtomQuantizer  # noqa: E402
from kvbench.quantizers.hierarchical import HierarchicalQuantizer  # noqa: E402
from kvbench.quantizers.windowed import WindowedQuantizer  # noqa: E402

ALL = slice(None)


def new(quantizer, side, like, capacity=128):
    shape = {"batch": like.shape[0], "heads": like.shape[1], "channels": like.shape[3]}
    return PackedSegment(
        **shape, dtype=like.dtype, device=like.device, quantizer=quantizer, side=side, capacity=capacity
    )


def both(quantizer, side, steps):
    """Append the steps (tokens, or tokens with an index) by the kernel and by torch; every bit must agree."""
    first = steps[0][0] if isinstance(steps[0], tuple) else steps[0]
    made, wanted = new(quantizer, side, first), new(quantizer, side, first)
    with pytest.MonkeyPatch.context() as patch:
        for segment in (made, wanted):
            for step in steps:
                x, index = step if isinstance(step, tuple) else (step, None)
                if segment is made:
                    assert isinstance(served(segment, x), Form), served(segment, x)
                segment.append(ALL, x) if index is None else segment.append_chosen(ALL, x, index)
            patch.setattr(packed, "served", lambda segment, x: "torch's way")
    same(made, wanted)


FORMATS = [
    (AffineQuantizer(4, 128), "key"),
    (AffineQuantizer(4, 16), "key"),
    (AffineQuantizer(2, 32), "key"),
    (AffineQuantizer(2, 64), "value"),
    (WindowedQuantizer(2, 128, 64), "key"),
    (AffineQuantizer(8, 32), "key"),
    (AffineQuantizer(3, 32), "key"),
    (AffineQuantizer(3, 128), "key"),
    (AffineQuantizer(3, None, "token"), "value"),
    (AffineQuantizer(3, 32, "token"), "key"),
    (AtomQuantizer(3, None, "token"), "value"),
    (AffineQuantizer(4, None, "token"), "value"),
    (AffineQuantizer(2, 32, "token"), "value"),
    (HierarchicalQuantizer(64), "key"),
    (HierarchicalQuantizer(32, "token"), "value"),
    (AtomQuantizer(4, None, "token"), "key"),
    (AtomQuantizer(2, None, "token"), "value"),
]


#: of each kind of quantizer the last one is packed from bfloat16 too
LAST = {type(quantizer): (quantizer, side) for quantizer, side in FORMATS}.values()


@pytest.mark.parametrize(
    ("quantizer", "side", "dtype"),
    fast(
        [(*form, dtype) for form in FORMATS for dtype in (torch.float16, torch.bfloat16)],
        lambda case: case[2] == torch.float16 or case[:2] in LAST,
    ),
    ids=lambda x: str(x).replace("Quantizer", ""),
)
def test_codes_and_parameters_equal_those_of_torch_bit_for_bit(quantizer, side, dtype):
    """A block at the front of a tile, then one behind it that leaves its fields alone; scales up to the dtype's end."""
    per = quantizer.block_tokens
    both(quantizer, side, [tokens(per if per > 1 else 37, 64, dtype), tokens(per, 64, dtype, 1, scale=3e4)])


def test_heads_of_128_channels_and_several_rows_and_heads():
    both(AffineQuantizer(4, 32), "key", [tokens(32, 128, torch.float16, heads=2)])
    both(AffineQuantizer(4, None, "token"), "value", [tokens(9, 128, torch.float16, batch=2)])


#: kinds of which `make test` packs a token alone: of each number of bits one
ALONE = [(AffineQuantizer, 2), (AtomQuantizer, 3), (AffineQuantizer, 4), (HierarchicalQuantizer, 8)]


@pytest.mark.parametrize(
    ("quantizer", "side"),
    fast((f for f in FORMATS if f[0].axis == "token"), lambda case: (type(case[0]), case[0].bits) in ALONE),
    ids=str,
)
def test_a_token_alone_is_packed_by_programs_of_one_word_row(quantizer, side):
    """At both ends of a word row's fields, at the end of a tile and behind it; several programs across wide heads."""
    many, one = tokens(30, 64, torch.bfloat16, heads=2), [tokens(1, 64, torch.bfloat16, n, heads=2) for n in range(4)]
    both(quantizer, side, [many, *one])
    both(quantizer, side, [tokens(126, 64, torch.float16), *(tokens(1, 64, torch.float16, n) for n in range(3))])
    if quantizer.group_size:
        both(quantizer, side, [tokens(1, 192, torch.bfloat16, n) for n in range(2)])
    form = served(new(quantizer, side, many), many)
    assert isinstance(form, Form)
    single, first, count = programs(form, 128 + 37, 1)
    if quantizer.bits == 3:  # whose words of 1 bit hold tokens of two rows
        assert (single, first, count) == (form, 0, form.parts)
    else:
        assert (single.rows, count) == (1, 1) and first == 37 % word_rows(quantizer.bits)
    assert programs(form, 120, 16) == (form, 0, 2 * form.parts)


def test_tokens_that_are_chosen_by_number_are_packed_in_that_order():
    index = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:64]
    for quantizer, side in ((AffineQuantizer(2, 32), "key"), (AffineQuantizer(4, 64, "token"), "value")):
        both(
            quantizer, side, [(tokens(150, 64, torch.float16), index), (tokens(150, 64, torch.float16, 1), index.int())]
        )
    thinned = tokens(64, 64, torch.float16)[:, :, 1::2]  # LogQuant's flush: every second token of a window
    both(AffineQuantizer(2, 32), "key", [thinned])


def test_rows_of_a_batch_are_written_one_by_one():
    x = tokens(32, 64, torch.bfloat16, batch=2)
    made, wanted = new(AffineQuantizer(4, 32), "key", x), new(AffineQuantizer(4, 32), "key", x)
    for row in (1, 0):
        made.append(slice(row, row + 1), x[row : row + 1])
    wanted.append(ALL, x)
    same(made, wanted)


def test_an_error_names_the_row_of_the_batch_not_of_the_append():
    x = tokens(32, 64, torch.float16, batch=3)
    segment = new(AffineQuantizer(4, 32), "key", x)
    x[2, 0, 7, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\(2, 0, 7, 5\)"):
        segment.append(slice(1, 3), x[1:])


def test_constant_groups_and_steps_below_fp16():
    rng = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 1, 32, 64), 0.1)
        x[..., ::16] = torch.tensor([0.0, -0.0]).repeat(16)[:, None]
        x[..., 1::4] = torch.rand(32, 16, generator=rng) * 1e-6  # steps that underflow, or are a few units of fp16
        x[..., 2::4] = torch.rand(32, 16, generator=rng) * 2e-5 - 1e-5
        for quantizer in (AffineQuantizer(4, 32), HierarchicalQuantizer(32), AtomQuantizer(4, 32, "channel")):
            both(quantizer, "key", [x.to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_any_bits_that_are_finite(dtype):
    """Values over the whole range of the dtype: subnormal ones, both zeros, groups whose range passes 65504."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (1, 1, 32, 64), generator=rng).to(torch.int16)
    # channels with one exponent, so that their codes are not all at the ends
    bits[..., 32:] = (bits[..., 32:] & 0x07FF) | torch.randint(0, 30, (32,), generator=rng).to(torch.int16) << 10
    x = bits.view(dtype)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    for quantizer in (AffineQuantizer(4, 32), HierarchicalQuantizer(32), AtomQuantizer(2, 32, "channel")):
        both(quantizer, "key", [x])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from([q for q in FORMATS if q[0].axis == "token"]),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.integers(0, 60),
    st.integers(1, 60),
    st.sampled_from([1e-4, 1.0, 6e4]),
)
def test_any_number_of_tokens_behind_any_other(form, dtype, held, count, scale):
    steps = [tokens(n, 64, dtype, n, scale=scale) for n in (held, count) if n]
    both(*form, steps)


@pytest.mark.parametrize(
    ("bad", "dtype", "quantizer", "side"),
    [
        (float("nan"), torch.float16, AffineQuantizer(4, 32), "key"),
        (float("inf"), torch.bfloat16, AffineQuantizer(4, None, "token"), "value"),
        (-float("inf"), torch.float16, AffineQuantizer(4, None, "token"), "key"),
        (float("nan"), torch.bfloat16, AffineQuantizer(4, 32), "value"),
    ],
)
def test_a_value_that_is_not_finite_is_named_by_its_place(bad, dtype, quantizer, side):
    x = tokens(64, 64, dtype, heads=2)
    x[0, 1, 37, 5] = x[0, 1, 37, 6] = x[0, 1, 60, 0] = bad  # the first of them
    segment = new(quantizer, side, x)
    with pytest.raises(NonFiniteError, match=r"\(0, 1, 37, 5\)"):
        segment.append(ALL, x)
    segment.append(ALL, x[:, :, :32])  # the record is clear again, and this half is sound


def test_what_the_kernel_does_not_serve_takes_the_other_way():
    x = tokens(96, 64, torch.float16)
    for quantizer, reason in (
        (WindowedQuantizer(3, 42), "3-bit"),
        (AffineQuantizer(4, 48), "groups of 48"),
        (WindowedQuantizer(2, 13, 8), "windows of 13"),
    ):
        segment = new(quantizer, "key", x)
        assert reason in served(segment, x)
        count = 96 // quantizer.block_tokens * quantizer.block_tokens
        segment.append(ALL, x[:, :, :count])
        assert segment.length(ALL) == count
    segment = new(AffineQuantizer(4, 32), "key", x)
    assert "contiguous" in served(segment, x.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert "contiguous" in served(segment, tokens(96, 66, torch.float16)[..., 1:65])  # pairs begin at odd addresses
    odd = torch.empty(96 * 65, dtype=torch.float16).as_strided((1, 1, 96, 64), (96 * 65, 96 * 65, 65, 1))
    assert "contiguous" in served(segment, odd)
    assert served(segment, x.float()) == "tokens in float32"
    assert served(new(AffineQuantizer(4, 32), "key", x.float()), x) == "a cache in float32"

    class Other(AffineQuantizer):
        """Its arithmetic may be another."""

    assert served(new(Other(4, 32), "key", x), x) == "codes of Other"


def test_tensors_on_a_cpu_are_packed_by_torch(monkeypatch):
    x = tokens(32, 64, torch.float16)
    monkeypatch.setattr(pack, "INTERPRET", False)
    assert served(new(AffineQuantizer(4, 32), "key", x), x) == "tensors on cpu"
    assert pack.missing() is None and not pack.compiled(torch.device("cpu"))
    monkeypatch.setattr(pack, "missing", lambda: "triton is not installed")
    assert served(new(AffineQuantizer(4, 32), "key", x), x) == "triton is not installed"
