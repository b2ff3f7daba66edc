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


def same(made, wanted):
    """Every bit of two segments' buffers agrees."""
    for a, b in zip(made.words + made.params, wanted.words + wanted.params, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
