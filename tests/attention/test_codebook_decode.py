"""The decode kernel for a codebook's codes, run by Triton's interpreter, against attention in fp32."""

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention.codebook.triton import decode as codebook_decode  # noqa: E402
from kvbench.attention.synthetic import error  # noqa: E402
from tests.attention.codebook_support import layer  # noqa: E402

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 6e-3}  # the interpreter truncates to bf16 where a GPU rounds


def check(held, query, logits=None):
    scaling = query.shape[-1] ** -0.5
    if logits is not None:
        held.work.logits = logits
    assert codebook_decode.refuses(query, held.work) is None
    found = codebook_decode.attend(query, held.work, scaling)
    assert found.dtype == query.dtype
    wanted = held.exact(query, scaling, held.work.logits)
    assert found.shape == wanted.shape
    assert error(found, wanted) < TOLERANCE[query.dtype]


def queries(batch, heads, channels, dtype=torch.float16, seed=1):
    return (torch.randn(batch, heads, 1, channels, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [1, 4])
def test_packed_tokens_between_sinks_and_a_tail(bits, group):
    check(layer([(3, 200, 2)], bits=bits), queries(1, 2 * group, 64))


def test_rows_of_different_lengths_and_positions():
    held = layer([(2, 130, 0), (0, 5, 0), (2, 257, 0)], starts=[0, 300, 129], dtype=torch.bfloat16)
    check(held, queries(3, 2, 64, torch.bfloat16))
