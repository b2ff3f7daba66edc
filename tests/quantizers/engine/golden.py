"""The stored outputs of the engines' reference code, with which these tests compare (tests/golden/README.md)."""

from pathlib import Path

import numpy as np
import torch

ARRAYS = np.load(Path(__file__).parents[2] / "golden" / "new" / "engines.npz")
#: tokens of the stored inputs, and tokens of the stored dequantized values
TOKENS, DEQUANTIZED = 48, 24


def array(name: str) -> torch.Tensor:
    """A stored array as a tensor; ``x`` is the input of all formats, fp32 ``[2, 48, 64]``."""
    stored = ARRAYS["x_64" if name == "x" else f"{name}_64"]
    return torch.from_numpy(stored.view(np.int32) if stored.dtype == np.uint32 else stored)


def same(quantizer, x, prefix, params=(), dequantized="_deq", offset=0):
    """Codes, parameters and dequantized values equal the stored ones, every bit."""
    codes, computed = quantizer.encode(x)
    assert torch.equal(codes.int() - offset, array(f"{prefix}_codes").int())
    assert len(computed) == len(params)
    for tensor, name in zip(computed, params, strict=True):
        stored = array(f"{prefix}_{name}")
        assert torch.equal(tensor.reshape(stored.shape).view(stored.dtype), stored)
    values = quantizer.decode(codes, computed, torch.float32)
    assert torch.equal(values[:, :DEQUANTIZED], array(prefix + dequantized))
