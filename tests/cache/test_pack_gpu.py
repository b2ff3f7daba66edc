"""On a GPU: the kernel that packs writes bit for bit what torch writes, and what is not finite is reported in time."""

import pytest
import torch

from kvbench.cache.kernels.jobs import Form
from kvbench.cache.kernels.pack import served
from kvbench.cache.segments import packed
from kvbench.cache.segments.packed import PackedSegment
from kvbench.errors import NonFiniteError
from kvbench.methods import load_method
from kvbench.quantizers import AffineQuantizer, AtomQuantizer
from kvbench.quantizers.engine.amd import Octave
from kvbench.quantizers.engine.llamacpp import IQ4NL
from kvbench.quantizers.hierarchical import HierarchicalQuantizer
from kvbench.quantizers.oscar import OscarQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer
from tests.zoo import feed, new_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = slice(None)
FORMATS = [
    *[(AffineQuantizer(bits, group), "key") for bits in (2, 3, 4, 8) for group in (16, 32, 64, 128)],
    *[(AffineQuantizer(bits, group, "token"), "value") for bits in (2, 3, 4, 8) for group in (32, 64, None)],
    (AffineQuantizer(4, 32), "value"),
    (AffineQuantizer(2, 32, "token"), "key"),
    (WindowedQuantizer(2, 64, 64), "key"),
    (WindowedQuantizer(2, 128, 32), "key"),
    *[(WindowedQuantizer(bits, window), "key") for bits in (2, 4, 8) for window in (42, 33, 85, 127)],
    (WindowedQuantizer(4, 42), "value"),
    (HierarchicalQuantizer(128), "key"),
    (HierarchicalQuantizer(32), "key"),
    (HierarchicalQuantizer(None, "token"), "value"),
    *[(OscarQuantizer(2, clip), side) for clip, side in ((0.96, "key"), (0.92, "value"), (1.0, "key"))],
    *[(AtomQuantizer(bits, None, "token"), side) for bits in (2, 4, 8) for side in ("key", "value")],
    (IQ4NL(), "key"),
    (IQ4NL(), "value"),
    (Octave(4, 64), "key"),
    (Octave(4, None, padding=1), "value"),
    (Octave(3, None), "key"),
    (Octave(3, None, padding=2), "value"),
]


def tokens(count, channels, dtype, seed, scale=1.0, batch=1):
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(batch, count, 3, channels, generator=rng, device="cuda") * scale
    x[..., 3] *= 9
    return x.clamp(-65504, 65504).to(dtype).transpose(1, 2)


def any_bits(count, channels, dtype, seed):
    rng = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (1, 3, count, channels), generator=rng, device="cuda").to(torch.int16)
    exponents = torch.randint(0, 30, (channels // 2,), generator=rng, device="cuda").to(torch.int16) << 10
    bits[..., channels // 2 :] = (bits[..., channels // 2 :] & 0x07FF) | exponents
    x = bits.view(dtype)
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


def pair(quantizer, side, like, capacity):
    shape = {"batch": like.shape[0], "heads": like.shape[1], "channels": like.shape[3], "dtype": like.dtype}
    return [
        PackedSegment(**shape, device=like.device, quantizer=quantizer, side=side, capacity=capacity) for _ in range(2)
    ]


def same(made, wanted):
    for a, b in zip(made.words + made.params, wanted.words + wanted.params, strict=True):
        differ = a.view(torch.int16) != b.view(torch.int16)
        assert not bool(differ.any()), f"{int(differ.sum())} of {differ.numel()} numbers differ"


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("quantizer", "side"), FORMATS, ids=lambda x: str(x).replace("Quantizer", ""))
def test_bit_for_bit(quantizer, side, dtype, channels, monkeypatch):
    per = quantizer.block_tokens
    odd = 37 if per == 1 else per

    def whole(count):
        """Of so many tokens, those that make whole blocks."""
        return count // per * per

    steps = [
        (tokens(whole(512), channels, dtype, 0), None),
        (tokens(odd, channels, dtype, 1, 3e4), None),
        (tokens(1 if per == 1 else per, channels, dtype, 2, 1e-5), None),
        (any_bits(whole(384), channels, dtype, 3), None),
        (tokens(700, channels, dtype, 4), torch.randperm(700, device="cuda")[: whole(256)]),
        (tokens(2 * whole(128), channels, dtype, 5)[:, :, 1::2], None),
    ]
    made, wanted = pair(quantizer, side, steps[0][0], 2048)
    for x, index in steps:
        assert isinstance(served(made, x), Form), served(made, x)
        made.append(ALL, x) if index is None else made.append_chosen(ALL, x, index)
    monkeypatch.setattr(packed, "served", lambda segment, x: "torch's way")
    for x, index in steps:
        wanted.append(ALL, x) if index is None else wanted.append_chosen(ALL, x, index)
    same(made, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_bit_for_bit_on_a_layer_of_its_own_size(dtype, monkeypatch):
    formats = ((AffineQuantizer(4, 128), "key"), (AffineQuantizer(2, 32, "token"), "value"))
    for quantizer, side in (*formats, (WindowedQuantizer(2, 42), "key")):
        x = tokens(32768 // quantizer.block_tokens * quantizer.block_tokens, 128, dtype, 0, batch=2)
        made, wanted = pair(quantizer, side, x, 32768)
        made.append(ALL, x)
        with monkeypatch.context() as patch:
            patch.setattr(packed, "served", lambda segment, x: "torch's way")
            wanted.append(ALL, x)
        same(made, wanted)


@pytest.mark.parametrize("side", [0, 1])
def test_a_prompt_that_is_not_finite_is_named_before_the_second_token(side):
    layer = new_layer(load_method("kivi", quantizer="int2", residual=32))
    both = [tokens(100, 64, torch.float16, seed) for seed in (0, 1)]
    both[side] = both[side].clone()
    both[side][0, 1, 17, 3] = float("nan")
    feed(layer, *both)  # attention to the prompt is exact: nothing is asked of the device yet
    name = ("key", "value")[side]
    with pytest.raises(NonFiniteError, match=rf"layer 0: NaN or Inf in the {name} at position 17 \(row 0, KV head 1"):
        feed(layer, *(x[:, :, :1] for x in both))


def test_a_token_that_is_not_finite_is_named_while_decoding():
    layer = new_layer(load_method("atom", quantizer="int4_token"))
    keys, values = (tokens(160, 64, torch.float16, seed) for seed in (0, 1))
    keys = keys.clone()
    keys[0, 2, 120, 9] = float("inf")
    feed(layer, keys[:, :, :100], values[:, :, :100])
    with pytest.raises(NonFiniteError, match=r"key at position 120 \(row 0, KV head 2, channel 9\)"):
        for t in range(100, 160):
            feed(layer, keys[:, :, t : t + 1], values[:, :, t : t + 1])
            torch.cuda.synchronize()  # as reading the token does


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kivi", {"residual": 32}),
        ("logquant", {"window": 32}),
        ("logquant", {"window": 42}),
        ("partial_logquant", {"window": 32}),
        ("atom", {"quantizer": "int4_token"}),
    ],
)
def test_steps_without_a_flush_and_with_one_wait_for_nothing(name, settings):
    layer = new_layer(load_method(name, **({"quantizer": "int2"} | settings)))
    keys, values = (tokens(400, 64, torch.float16, seed) for seed in (0, 1))
    feed(layer, keys[:, :, :200], values[:, :, :200])
    for t in range(200, 300):  # compiles, fills what is kept on the device
        feed(layer, keys[:, :, t : t + 1], values[:, :, t : t + 1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(300, 400):
            layer.update(keys[:, :, t : t + 1], values[:, :, t : t + 1])
            layer.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
