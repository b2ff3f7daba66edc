"""Kernels of a cache refuse every format and dtype that is not in their lists; torch then stores the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.cache.packing import interpret, interpreted, new, same, tokens  # noqa: F401

interpreted()

from kvbench.cache.kernels import at_once, evict, pack_together, roll_together  # noqa: E402
from kvbench.cache.kernels import at_once as appending  # noqa: E402
from kvbench.cache.kernels.jobs import Form  # noqa: E402
from kvbench.cache.kernels.pack import served  # noqa: E402
from kvbench.cache.kernels.reads import HEAD, Reads, Rows, format_refusal  # noqa: E402
from kvbench.cache.segments.base import FullSegment  # noqa: E402
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment  # noqa: E402
from kvbench.cache.segments.rolling import RollingSegment  # noqa: E402
from kvbench.quantizers.affine import AffineQuantizer  # noqa: E402
from kvbench.quantizers.atom import AtomQuantizer  # noqa: E402
from kvbench.quantizers.engine.llamacpp import Signed  # noqa: E402
from kvbench.quantizers.kvarn import KvarnQuantizer  # noqa: E402
from kvbench.quantizers.oscar import OscarQuantizer  # noqa: E402
from kvbench.quantizers.spec import PLANES  # noqa: E402
from kvbench.quantizers.turboquant import LevelQuantizer, TruncatingQuantizer  # noqa: E402
from kvbench.quantizers.windowed import WindowedQuantizer  # noqa: E402
from tests import zoo  # noqa: E402

ALL = slice(None)


def test_a_format_is_read_if_one_row_has_all_of_it():
    rows = Rows(
        (
            Reads("a", (4,), {"token": (16, HEAD)}),
            Reads("a", (8,), {"channel": (32,)}, ("", "fp32"), heads=(64,)),
            Reads("w", (2,), {"channel": range(8, 65)}, windows=range(8, 100)),
        )
    )
    for asked, reason in (
        (("a", 4, "token", 16, 64), None),
        (("a", 4, "token", 80, 80), None),  # all channels of a head
        (("a", 8, "channel", 32, 64, ""), None),
        (("w", 2, "channel", 21, 64, "fp16", 42), None),
        (("b", 4, "token", 16, 64), "codes of the kind b"),
        (("a", 5, "token", 16, 64), "5-bit codes"),
        (("a", 4, "channel", 16, 64), "groups per channel"),
        (("a", 8, "channel", 32, 64), "codes with scales in fp16"),
        (("a", 4, "token", 16, 64, ""), "codes with scales in no type"),
        (("a", 4, "token", 16, 72), "groups of 16 channels"),
        (("a", 4, "token", 32, 64), "groups of 32 channels"),
        (("a", 8, "channel", 64, 64, "fp32"), "groups of 64 tokens"),
        (("a", 8, "channel", 32, 80, "fp32"), "heads of 80 channels"),
        (("w", 2, "channel", 21, 64), "windows of 0 tokens"),
        (("a", 4, "token", 16, 64, "fp16", 42), "windows of 42 tokens"),
    ):
        assert format_refusal(rows, *asked) == reason


class Other(AffineQuantizer):
    """Its arithmetic may be another."""


#: what a packing kernel does not know: a quantizer, channels of a head, and the reason
UNKNOWN = [
    (lambda: AffineQuantizer(5, 32), 64, "5-bit codes"),
    (lambda: AffineQuantizer(6, None, "token"), 64, "6-bit codes"),
    (lambda: AffineQuantizer(7, 32, "token"), 64, "7-bit codes"),
    (lambda: AtomQuantizer(5, None, "token"), 64, "5-bit codes"),
    (lambda: WindowedQuantizer(5, 42), 64, "windows of 42 tokens in 5-bit codes"),
    (lambda: WindowedQuantizer(2, 13, 8), 64, "windows of 13 tokens in groups of 6 tokens"),
    (lambda: Other(4, 32), 64, "codes of Other"),
    (lambda: AffineQuantizer(4, 48), 64, "groups of 48 tokens"),
    (lambda: AffineQuantizer(4, 40, "token"), 40, "groups of 40 channels"),
    (lambda: AffineQuantizer(4, 32), 40, "heads of 40 channels"),
    (lambda: Signed(5), 64, "5-bit codes"),
    (lambda: TruncatingQuantizer(2), 64, "2-bit codes"),
    (lambda: TruncatingQuantizer(5), 64, "5-bit codes"),
    (lambda: LevelQuantizer(5), 64, "5-bit codes"),
    (lambda: OscarQuantizer(5), 64, "5-bit codes"),
    (lambda: OscarQuantizer(2, 0.96), 96, "heads of 96 channels"),
    (lambda: KvarnQuantizer(5, 64, "channel"), 64, "5-bit codes"),
    (lambda: KvarnQuantizer(4, 32, "token"), 64, "groups of 32 tokens"),
    (lambda: KvarnQuantizer(4, 64, "token"), 96, "heads of 96 channels"),
]


@pytest.mark.parametrize(("make", "channels", "reason"), UNKNOWN, ids=lambda x: x if isinstance(x, str) else "")
def test_what_a_packing_kernel_does_not_know_is_packed_by_torch(make, channels, reason, monkeypatch):
    """Not one bit differs from what torch stores where no kernel is asked, and the segment says why."""
    from kvbench.cache.kernels import pack

    monkeypatch.setitem(PLANES, 7, (4, 2, 1))
    quantizer = make()
    x = tokens(2 * quantizer.block_tokens if quantizer.block_tokens > 1 else 37, channels, torch.float16)
    asked, plain = (new(quantizer, "key", x) for _ in range(2))
    assert served(asked, x) == reason
    asked.append(ALL, x)
    monkeypatch.setattr(pack, "INTERPRET", False)
    plain.append(ALL, x)
    same(asked, plain)
    assert asked.by_torch == {f"packing by torch ({reason})"} and not plain.by_torch
    twin = asked.clone()
    twin.by_torch.clear()
    assert asked.by_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_a_packing_kernel_does_not_know(dtype):
    quantizer, half = AffineQuantizer(4, 32), tokens(32, 64, torch.float16)
    name = str(dtype).removeprefix("torch.")
    assert served(new(quantizer, "key", half), half.to(dtype)) == f"tokens in {name}"
    assert served(new(quantizer, "key", half.to(dtype)), half) == f"a cache in {name}"


@pytest.mark.parametrize(
    ("bits", "heads", "channels", "dtype", "reason"),
    [
        (4, 2, 64, torch.float16, None),
        (5, 2, 64, torch.float16, "5-bit codes"),
        (4, 2, 40, torch.float16, "heads of 40 channels"),
        (4, 2, 64, torch.float64, "tokens are float64"),
    ],
)
def test_the_kernel_of_codebooks_in_captured_steps(bits, heads, channels, dtype, reason):
    made = []
    for side in ("key", "value"):
        bounds = torch.stack([torch.full((heads * channels,), 2.0), torch.full((heads * channels,), -2.0)]).half()
        form = NuqFormat(
            bits, torch.linspace(-1, 1, 2**bits), thresholds=bounds if side == "key" else None, outliers=0.0
        )
        made.append(NuqSegment(1, heads, channels, dtype, "cpu", form=form, side=side))
    assert at_once.packing_refusal(tuple(made)) == reason


def test_the_kernel_of_formats_of_engines_in_captured_steps():
    x = tokens(1, 64, torch.float16)
    known, unknown = new(TruncatingQuantizer(4), "value", x), new(TruncatingQuantizer(5), "value", x)
    assert at_once.packing_refusal((known, known)) is None
    assert at_once.packing_refusal((known, unknown)).endswith("TruncatingQuantizer(bits=5) on the device: 5-bit codes")


@pytest.mark.parametrize(("dtype", "copied"), [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)])
def test_copies_of_tokens_in_a_dtype_that_kernels_do_not_know(dtype, copied, monkeypatch):
    """Rolling, thinning, eviction and appending: torch moves the same tokens, and a segment says why."""
    monkeypatch.setattr(roll_together, "INTERPRET", True)
    monkeypatch.setattr(pack_together, "INTERPRET", True)
    rolled = RollingSegment(1, 1, 24, dtype, "cpu", sinks=2, capacity=40)
    x = torch.randn(1, 1, 30, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    rolled.append(ALL, x)
    rolled.roll(ALL, 5, 5)
    assert torch.equal(rolled.view(ALL), torch.cat([x[:, :, :2], x[:, :, 7:]], 2))
    assert rolled.by_torch == (set() if copied else {"rolling by torch (tokens in float64)"})

    window = FullSegment(1, 1, 24, dtype, "cpu", capacity=30)
    window.append(ALL, x)
    packed = new(AffineQuantizer(4, 2), "key", x)
    packed.thin(window, ALL, 4)
    assert torch.equal(window.view(ALL), x[:, :, [0, 2, 4, 6, *range(8, 30)]])
    assert packed.by_torch == (set() if copied else {"thinning by torch (tokens in float64)"})

    onto = SimpleNamespace(is_cuda=True)  # a segment of a GPU, of which no attention is pending
    tail = SimpleNamespace(buffer=onto, dtype=dtype, by_torch=set(), lengths=[1], pending=[[]])
    assert not evict.can_drop_lowest(tail, tail, ALL)
    assert tail.by_torch == (set() if copied else {"eviction by torch (tokens in float64)"})

    buffers = torch.zeros(1, 1, 9, 24).bfloat16(), torch.zeros(1, 1, 9, 24, dtype=dtype)
    appending.append(x[:, :, :2], x[:, :, 2:4], *buffers, torch.tensor([[4, 1]], dtype=torch.int32))
    assert torch.equal(buffers[0][:, :, 4:6], x[:, :, :2].bfloat16())  # arithmetic in another dtype than storage
    assert torch.equal(buffers[1][:, :, 1:3], x[:, :, 2:4]) and not buffers[0][:, :, 6:].any()


def test_a_row_says_what_torch_did():
    from kvbench.attention.cpu import build
    from kvbench.methods import load_method

    method, model = load_method("kivi", quantizer="int5", residual=32), zoo.model("llama", torch.float16)
    cache = method.new_cache(model)
    ids = torch.arange(70)[None] % 90 + 3
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.path == "none+packing by torch (5-bit codes)"
        model(ids[:, :1], past_key_values=cache)
    reader = "reference" if build.missing() else build.kernel_name()
    assert cache.path.startswith(f"{reader}+packing by torch (5-bit codes)")
    assert isinstance(
        served(new(AffineQuantizer(4, 32), "key", tokens(32, 64, torch.float16)), tokens(32, 64, torch.float16)), Form
    )
    method.detach(model)
