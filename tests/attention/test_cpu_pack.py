"""Packing by the CPU kernel of every instruction set that the machine has: bit for bit what torch packs."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.attention.cpu import build, pack
from kvbench.cache.segments.packed import PackedSegment
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.quantizers import AffineQuantizer, HierarchicalQuantizer
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.spec import PLANES
from kvbench.quantizers.windowed import WindowedQuantizer
from tests.attention.test_cpu_decode import SETS

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

DTYPES = [torch.bfloat16, torch.float32]


def segments(quantizer, side="value", *, dtype=torch.bfloat16, channels=64, capacity=384, instructions=None):
    """A segment that torch packs, and one that the kernel packs, which counts in `packed` how often it did."""
    pair = [
        PackedSegment(2, 3, channels, dtype, "cpu", quantizer=quantizer, side=side, capacity=capacity) for _ in range(2)
    ]
    pair[1].packed_by_kernel = []

    def packer(segment, row, x, start):
        done = pack.pack_tokens(segment, row, x, start, instructions)
        segment.packed_by_kernel.append(done)
        return done

    pair[1].packer = packer
    return pair


def tokens(count, *, rows=2, dtype=torch.bfloat16, channels=64, seed=0):
    """Tokens of all sizes, with constant groups, zeros of either sign, and groups of one sign."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, count, channels, generator=rng)
    x *= 10.0 ** torch.randint(-9, 6, (rows, 3, count, 1), generator=rng)
    kinds = torch.randint(0, 8, (rows, 3, count, 1), generator=rng)
    x = torch.where(kinds == 1, x[..., :1].expand_as(x), x)
    x = torch.where(kinds == 2, x.abs(), x)
    x = torch.where(kinds == 3, -x.abs(), x)
    x = torch.where(kinds == 4, torch.zeros_like(x) * x.sign(), x)
    x = torch.where(kinds == 5, x + 1e4, x)
    return x.to(dtype)


def same(pair):
    wanted, found = pair
    assert wanted.lengths == found.lengths
    assert found.packed_by_kernel and all(found.packed_by_kernel)
    for a, b in zip([*wanted.words, *wanted.params], [*found.words, *found.params], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [AffineQuantizer, AtomQuantizer])
def test_every_format_is_packed_as_torch_does(kind, dtype, side, instructions):
    for bits in PLANES:
        if bits == 1:
            continue
        for group in (16, None):
            pair = segments(kind(bits, group, "token"), side, dtype=dtype, instructions=instructions)
            for segment in pair:
                segment.append(slice(0, 2), tokens(150, dtype=dtype))
                segment.append(slice(0, 2), tokens(1, dtype=dtype, seed=1))
                segment.append(slice(1, 2), tokens(40, rows=1, dtype=dtype, seed=2))
            same(pair)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "quantizer",
    [
        *(AffineQuantizer(bits, group, "channel") for bits, group in ((2, 32), (3, 128), (4, 16), (5, 64), (8, 32))),
        AtomQuantizer(4, 32, "channel"),
        *(WindowedQuantizer(bits, window) for bits, window in ((2, 42), (4, 85), (3, 96), (2, 256))),
    ],
    ids=repr,
)
def test_groups_of_tokens_are_packed_as_torch_does(quantizer, dtype, instructions):
    block = quantizer.block_tokens
    pair = segments(quantizer, "key", dtype=dtype, capacity=2 * block, instructions=instructions)
    for segment in pair:
        segment.append(slice(0, 2), tokens(2 * block, dtype=dtype))
        segment.append(slice(0, 2), tokens(block, dtype=dtype, seed=1))
        segment.append(slice(1, 2), tokens(block, rows=1, dtype=dtype, seed=2))
    same(pair)


@given(
    counts=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    bits=st.sampled_from([bits for bits in PLANES if bits > 1]),
    kind=st.sampled_from([AffineQuantizer, AtomQuantizer]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_random_tokens_in_several_steps(counts, bits, kind, dtype, seed):
    pair = segments(kind(bits, 32, "token"), dtype=dtype, capacity=0)
    for number, count in enumerate(counts):
        x = tokens(count + 3, dtype=dtype, seed=seed + number).transpose(1, 2).contiguous().transpose(1, 2)
        for segment in pair:
            segment.append(slice(0, 2), x[:, :, 2:-1])  # a part of a larger buffer, which has other strides
    same(pair)


def test_rows_of_different_lengths_get_a_token_each():
    pair = segments(AffineQuantizer(4, 32, "token"))
    for segment in pair:
        segment.append(slice(0, 1), tokens(127, rows=1))
        segment.append(slice(1, 2), tokens(31, rows=1))
        segment.append_each(tokens(2, seed=3))
    same(pair)
    assert pair[1].lengths == [129, 33]


def test_threads_do_not_change_a_bit(monkeypatch):
    pair = segments(AffineQuantizer(3, 32, "token"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for segment in pair:
        segment.append(slice(0, 2), tokens(380))
    same(pair)


def test_buffers_that_have_moved_are_found_again():
    pair = segments(AffineQuantizer(4, 32, "token"), capacity=1)
    for segment in pair:
        segment.append(slice(0, 2), tokens(10))
        segment.select(torch.tensor([1, 0]))
        segment.append(slice(0, 2), tokens(300, seed=1))
    same(pair)
    twin = pair[1].clone()
    assert twin.prepared is None  # it would keep the words of the other in memory
    twin.append(slice(0, 2), tokens(1, seed=2))
    same(pair)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_left_to_torch_which_says_where(bad):
    _, segment = segments(AffineQuantizer(4, 32, "token"))
    x = tokens(3)
    x[1, 2, 1, 40] = bad
    with pytest.raises(NonFiniteError, match=r"\(1, 2, 1, 40\)"):
        segment.append(slice(0, 2), x)
    assert segment.packed_by_kernel == [False] and segment.lengths == [0, 0]


def test_what_is_not_finite_in_a_group_of_tokens_is_left_to_torch():
    _, segment = segments(AffineQuantizer(4, 32, "channel"))
    x = tokens(64)
    x[1, 2, 40, 7] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\(1, 2, 40, 7\)"):
        segment.append(slice(0, 2), x)
    with pytest.raises(ConfigError, match="does not divide the 33 tokens"):
        segment.append(slice(0, 2), tokens(33))
    assert segment.packed_by_kernel == [False, False] and segment.lengths == [0, 0]


def test_a_scale_beyond_the_largest_number_is_left_to_torch():
    pair = segments(AffineQuantizer(4, 32, "token"), dtype=torch.float32)
    x = torch.full((2, 3, 1, 64), 3e38)
    x[..., ::2] *= -1
    for segment in pair:
        segment.append(slice(0, 2), x)
    assert pair[1].packed_by_kernel == [False]
    assert torch.equal(pair[0].words[0], pair[1].words[0])


@pytest.mark.parametrize(
    ("quantizer", "dtype", "given"),
    [
        (HierarchicalQuantizer(32, "token"), torch.bfloat16, torch.bfloat16),
        (AffineQuantizer(4, 8, "token"), torch.bfloat16, torch.bfloat16),
        (AffineQuantizer(4, 32, "token"), torch.float16, torch.float16),
        (AffineQuantizer(4, 32, "token"), torch.bfloat16, torch.float32),
    ],
)
def test_what_is_not_served_is_packed_by_torch(quantizer, dtype, given):
    pair = segments(quantizer, dtype=dtype)
    for segment in pair:
        segment.append(slice(0, 2), (tokens(64).float() / 1e3).to(given))
    assert not any(pair[1].packed_by_kernel) and pair[1].lengths == [64, 64]
    assert torch.equal(pair[0].words[0], pair[1].words[0])


def test_without_a_library_torch_packs(monkeypatch):
    monkeypatch.setattr(build, "kernel_library", lambda instructions=None: "there is no C++ compiler")
    segment = segments(AffineQuantizer(4, 32, "token"))[0]
    segment.packer = partial(pack.pack_tokens)
    segment.append(slice(0, 2), tokens(3))
    assert segment.lengths == [3, 3]
