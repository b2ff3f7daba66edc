"""On a GPU: the Triton decode kernel itself, for every format and at long splits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.attention import check_cases
from kvbench.attention.check_cases import Case, channel, one_packed_segment, token
from kvbench.attention.synthetic import dequantized_attention, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 4.5e-3}  # bf16 alone rounds the output by 2e-3
#: kinds and bits of codes that this kernel reads; others are for the CUDA kernel
KINDS, BITS = {"full", "affine", "atom", "hierarchical"}, {2, 4, 8}


def kernel():
    triton_decode = pytest.importorskip("kvbench.attention.triton.decode")
    if triton_decode.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1: this process interprets kernels on the CPU")
    return triton_decode


def check(case, heads=None):
    triton_decode, query, work = kernel(), case.query(), case.work(0)
    assert triton_decode.refuses(query, work) is None
    scaling = query.shape[-1] ** -0.5
    found = triton_decode.attend(query, work, scaling)
    wanted = dequantized_attention(query, work, scaling, heads)
    assert relative_error(found[:, :, : wanted.shape[2]], wanted) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", check_cases.correctness(), ids=lambda case: case.name)
def test_formats(case):
    """Right, or refused by name: the formats of engines, KVarN's cross factors, and 3 bits."""
    forms = {form for key, value, _ in case.tiers for form in (key, value)}
    if all(form.kind in KINDS and form.bits in BITS for form in forms):
        return check(case)
    reason = kernel().refuses(case.query(), case.work(0))
    assert reason is not None and any(form.kind in reason or f"{form.bits}" in reason for form in forms)


@pytest.mark.memory  # millions of tokens are drawn in fp32, and compared in fp32
@pytest.mark.parametrize(
    ("tiers", "shape", "context"),
    [
        (check_cases.INT4, "7b", (131072,) * 8),  # 64k tokens in each of two parts
        (check_cases.INT4, "8b", (262144,)),
        (check_cases.INT8, "7b", (262144,)),
        (check_cases.INT2, "8b", (131072,) * 16),
    ],
)
def test_long_splits_do_not_drift(tiers, shape, context):
    check(Case("long", shape, tiers, context), slice(0, 2))


@pytest.mark.parametrize(
    "tiers",
    [
        one_packed_segment(channel(4, 32), token(4, 32)),
        one_packed_segment(channel(2, 64), token(2, 64)),
        check_cases.LOGQUANT_W42,
        one_packed_segment(channel(8, 64, "hierarchical"), token(8, 64, "hierarchical")),
        one_packed_segment(token(4, 64, "atom"), token(4, 64, "atom")),
    ],
    ids=["int4", "int2", "int2 W42", "int8", "atom"],
)
@settings(max_examples=8, deadline=None)  # of each, as new shapes are compiled
@given(
    st.sampled_from(sorted(check_cases.SHAPES)),
    st.lists(st.integers(300, 9000), min_size=1, max_size=3),
    st.integers(0, 100),
    st.integers(0, 190),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_any_shape(tiers, shape, context, keys, more_values, queries, dtype):
    window = (queries + keys, queries + keys + more_values)
    check(Case("any", shape, tiers, tuple(context), window, queries, dtype))
