"""Shared parts of the tests of packing kernels: the interpreter switched on for a module, tokens, equal buffers."""

import os

import pytest
import torch

from tests.attention.interpreter import require


def interpreted():
    """Skip the module where the GPU runs the kernels themselves, or where Triton is missing."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "the GPU runs the kernel itself (test_pack_gpu.py); TRITON_INTERPRET=1 runs this", allow_module_level=True
        )
    require()


@pytest.fixture(autouse=True, scope="module")
def interpret():
    """Only here: other tests of this process shall not have their CPU caches interpreted."""
    from kvbench.cache.kernels import pack

    pack.INTERPRET = True
    yield
    pack.INTERPRET = False


def tokens(count, channels, dtype, seed=0, batch=1, heads=1, scale=1.0):
    """Keys or values as models make them: token by token, seen as [B, H, T, D]."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, count, heads, channels, generator=rng) * scale
    x[..., 3] *= 9  # keys have channels that stand out
    return x.clamp(-65504, 65504).to(dtype).transpose(1, 2)


def same(computed, wanted):
    """Every bit of two segments' buffers agrees."""
    for a, b in zip(computed.words + computed.params, wanted.words + wanted.params, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def new(quantizer, side, like):
    """Return an empty segment for tokens of the shape and dtype of `like`."""
    from kvbench.cache.segments.packed import PackedSegment

    shape = {"batch": like.shape[0], "heads": like.shape[1], "channels": like.shape[3]}
    return PackedSegment(**shape, dtype=like.dtype, device="cpu", quantizer=quantizer, side=side, capacity=128)


def both(quantizer, side, steps):
    """Append the steps by the kernel and by torch; every bit of words and parameters must agree."""
    from kvbench.cache.kernels.jobs import Form
    from kvbench.cache.kernels.pack import served
    from kvbench.cache.segments import packed

    computed, wanted = new(quantizer, side, steps[0]), new(quantizer, side, steps[0])
    for x in steps:
        assert isinstance(served(computed, x), Form), served(computed, x)
        computed.append(slice(None), x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "served", lambda segment, x: "torch's way")
        for x in steps:
            wanted.append(slice(None), x)
    same(computed, wanted)
    return computed


def special(count, channels, dtype):
    """Return at least ten tokens: of zeros, of one value, with ties, tiny, huge, of one sign, far from 0, of -0."""
    x = tokens(count, channels, torch.float32, 3)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = 0.0, 0.75, torch.arange(channels) % 13 * 0.5 - 3
    x[0, 0, 3] *= 1e-5
    x[0, 0, 4] *= 3e3
    x[0, 0, 5].abs_()
    x[0, 0, 6] = -x[0, 0, 6].abs()
    x[0, 0, 7] = 1000 + x[0, 0, 7] * 0.01
    x[0, 0, 8, 1:] = 0.0
    x[0, 0, 9, ::2] = -0.0
    return x.to(dtype)


def in_one_launch(quantizer):
    """Check that tokens of two layers, packed together, have the bits of tokens that are packed layer by layer."""
    from kvbench.cache.kernels.jobs import Deferred
    from kvbench.cache.kernels.pack_together import packing_together
    from kvbench.cache.watch import Watch, uncached_message

    x = [tokens(3, 64, torch.bfloat16, seed) for seed in range(2)]
    watch, queue = Watch(torch.device("cpu")), Deferred()
    segments = [new(quantizer, "value", x[0]) for _ in x]
    for segment in segments:
        segment.watch, segment.packs = (watch, watch.tag(uncached_message)), queue
    with packing_together(queue):
        for segment, part in zip(segments, x, strict=True):
            segment.append(slice(None), part)
    for segment, part in zip(segments, x, strict=True):
        alone = new(quantizer, "value", part)
        alone.append(slice(None), part)
        same(segment, alone)
