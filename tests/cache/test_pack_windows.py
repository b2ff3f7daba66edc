"""Windows whose groups do not fit tiles, packed in Triton's interpreter: bit for bit what torch's way writes."""

import pytest
import torch

from tests.cache.packing import interpret, interpreted, same, tokens  # noqa: F401
from tests.marks import fast

interpreted()

from kvbench.cache.kernels import pack, pack_together  # noqa: E402
from kvbench.cache.kernels.jobs import Deferred, Form  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.segments import packed  # noqa: E402
from kvbench.cache.segments.packed import PackedSegment, fits_tiles  # noqa: E402
from kvbench.cache.watch import Watch  # noqa: E402
from kvbench.errors import NonFiniteError  # noqa: E402
from kvbench.quantizers.windowed import WindowedQuantizer  # noqa: E402

ALL = slice(None)


def new(quantizer, like, capacity=256, side="key"):
    """An empty segment whose every bit is set, so that what is written where it should not be shows."""
    segment = PackedSegment(
        like.shape[0],
        like.shape[1],
        like.shape[3],
        like.dtype,
        "cpu",
        quantizer=quantizer,
        side=side,
        capacity=capacity,
    )
    for buffer in segment.words + segment.params:
        buffer.view(torch.int16).fill_(-1)
    return segment


def both(quantizer, steps, side="key", capacity=256):
    """Append the steps (tokens, and which of them) by the kernel and by torch; every bit of the buffers must agree."""
    made, wanted = (new(quantizer, steps[0][0], capacity, side) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for segment in (made, wanted):
            for x, index in steps:
                if segment is made:
                    how = served(segment, x)
                    assert isinstance(how, Form) and how.window == quantizer.window, how
                segment.append(ALL, x) if index is None else segment.append_chosen(ALL, x, index)
            patch.setattr(packed, "served", lambda segment, x: "torch's way")
    same(made, wanted)


#: bits, W, most tokens of a group: groups of 42, 33, 43 and 42, 48, 64 and 63, 9 and 8, 15 and 14, 20 and 19
WINDOWS = [(2, 42, 64), (4, 42, 64), (8, 42, 64), (2, 33, 64), (4, 85, 64), (2, 96, 64), (8, 127, 64), (4, 25, 9)]
WINDOWS += [(2, 43, 16), (2, 59, 20)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


#: windows of each number of bits that `make test` packs
FAST = [(2, 42, 64), (8, 127, 64), (4, 85, 64), (4, 25, 9), (2, 59, 20)]


@DTYPES
@pytest.mark.parametrize(("bits", "window", "most"), fast(WINDOWS, FAST))
def test_windows_one_after_another(bits, window, most, dtype):
    """One window, two, one of large numbers: what stands before and behind keeps its bits."""
    quantizer = WindowedQuantizer(bits, window, most)
    assert not fits_tiles(quantizer)
    steps = [(tokens(window * n, 32, dtype, n, scale=scale), None) for n, scale in ((1, 1.0), (2, 1.0), (1, 3e4))]
    both(quantizer, steps)


@pytest.mark.parametrize(("bits", "window"), [(2, 42), (4, 33), (2, 85)])
def test_appends_at_every_place_of_a_tile(bits, window):
    """Window by window through several tiles, so that they begin and end at fields' and tiles' ends and between."""
    steps = [(tokens(window, 16, torch.float16, n), None) for n in range(2 * 128 // window + 2)]
    both(WindowedQuantizer(bits, window, 64), steps, capacity=128 * 4)


def test_a_window_of_a_power_of_two_goes_on_with_the_other_kernel():
    x = tokens(64, 32, torch.float16)
    for window in (16, 64, 192):
        how = served(new(WindowedQuantizer(2, window, 64), x), x)
        assert isinstance(how, Form) and how.window == 0


def test_tokens_that_are_chosen_by_number():
    """As LogQuant packs a prompt; and its flush, every second token of a window."""
    quantizer = WindowedQuantizer(2, 42, 64)
    index = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:168]
    thinned = tokens(84, 32, torch.bfloat16, 2)[:, :, 1::2]
    x = tokens(200, 32, torch.bfloat16)
    both(quantizer, [(x, index), (thinned, None), (x, index[:42].int())])


def test_rows_heads_wide_heads_and_the_order_of_values():
    quantizer = WindowedQuantizer(2, 42, 64)
    both(quantizer, [(tokens(84, 128, torch.bfloat16, batch=2, heads=2), None)])
    for bits in (4, 8):
        both(WindowedQuantizer(bits, 42, 64), [(tokens(84, 48, torch.float16), None)], side="value")
    x = tokens(84, 32, torch.bfloat16, batch=2)
    made, wanted = new(quantizer, x), new(quantizer, x)
    for row in (1, 0):
        made.append(slice(row, row + 1), x[row : row + 1])
    wanted.append(ALL, x)
    same(made, wanted)


def test_a_buffer_that_grows():
    """Words and parameters move, and the next window goes behind them."""
    steps = [(tokens(42, 16, torch.float16, n), None) for n in range(5)]
    both(WindowedQuantizer(2, 42, 64), steps, capacity=42)


@DTYPES
def test_any_bits_that_are_finite_and_constant_groups(dtype):
    """Values over the whole range of the dtype: subnormal ones, both zeros, groups whose range passes 65504."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (1, 1, 84, 96), generator=rng).to(torch.int16)
    # channels with one exponent, so that their codes are not all at the ends
    bits[..., 32:] = (bits[..., 32:] & 0x07FF) | torch.randint(0, 30, (64,), generator=rng).to(torch.int16) << 10
    x = bits.view(dtype)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    x[..., 64:72] = torch.tensor([0.0, -0.0, 0.1, -7.0]).repeat(2)
    x[..., 72:74] = torch.tensor([0.0, -0.0]).repeat(42)[:, None]
    x[..., 74:84] = (torch.rand(84, 10, generator=rng) * 1e-6).to(dtype)  # steps that underflow
    for width, window in ((2, 42), (4, 42), (8, 21)):
        both(WindowedQuantizer(width, window, 64), [(x, None)])


@pytest.mark.parametrize(
    ("token", "bad", "dtype"),
    [
        pytest.param(127, float("nan"), torch.float16, marks=pytest.mark.slow),
        (128, -float("inf"), torch.bfloat16),
        pytest.param(161, float("inf"), torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_value_that_is_not_finite_is_named_by_its_place(bad, dtype, token):
    """Also where its group lies in two tiles, whose programs both see it: one alone holds its place."""
    x = tokens(168, 16, dtype, heads=2)
    segment = new(WindowedQuantizer(2, 42, 64), x)
    segment.append(ALL, x[:, :, :84])
    worse = x[:, :, 84:].clone()
    worse[0, 1, token - 84, 5] = bad
    with pytest.raises(NonFiniteError, match=rf"\(0, 1, {token}, 5\)"):
        segment.append(ALL, worse)
    segment.append(ALL, x[:, :, 84:])  # the record is clear again
    index = torch.arange(84).flip(0)
    with pytest.raises(NonFiniteError, match=rf"\(0, 1, {168 + 83 - (token - 84)}, 5\)"):
        segment.append_chosen(ALL, worse, index)


def test_layers_are_packed_in_one_launch(monkeypatch):
    """The same bits as one by one; warming up packs nothing."""
    launches, plain = [], pack_together.pack_alike
    monkeypatch.setattr(pack_together, "pack_alike", lambda group: (launches.append(len(group)), plain(group)))
    quantizer, watch, packs = WindowedQuantizer(2, 42, 64), Watch(torch.device("cpu")), Deferred()
    alone, joint = ([new(quantizer, tokens(1, 16, torch.bfloat16, batch=2)) for _ in range(2)] for _ in range(2))
    for n, segment in enumerate(joint):
        segment.watch = (watch, watch.tag(lambda place, n=n: f"layer {n}: {place}"))
        segment.packs = packs
    pack.warm_packing(joint[0], tokens(1, 16, torch.bfloat16, batch=2))
    same(joint[0], alone[0])
    assert launches == [1]
    for step in range(4):
        exact = [tokens(84, 16, torch.bfloat16, 2 * step + n, batch=2) for n in range(2)]
        with pack_together.packing_together(packs):
            for x, segment in zip(exact, joint, strict=True):
                segment.append(ALL, x[:, :, 1::2])
        for x, segment in zip(exact, alone, strict=True):
            segment.append(ALL, x[:, :, 1::2])
    assert launches == [1, 2, 2, 2, 2]
    for made, wanted in zip(joint, alone, strict=True):
        same(made, wanted)


def test_groups_that_are_too_short_or_too_long_take_the_other_way():
    x = tokens(70, 32, torch.float16)
    for window, most, reason in ((17, 8, "groups of 5"), (65, 128, "groups of 65"), (7, 64, "groups of 7")):
        assert reason in served(new(WindowedQuantizer(2, window, most), x), x)
    assert "3-bit" in served(new(WindowedQuantizer(3, 42), x), x)
    assert "heads of 24" in served(new(WindowedQuantizer(2, 42), x[..., :24]), x[..., :24])
