"""vLLM's formats: bit-equal to its kernels, and their edge cases."""

import pytest
import torch

from kvbench.errors import NonFiniteError
from kvbench.quantizers.engine.vllm import (
    Fp8,
    Fp8PerTokenHead,
    Int4PerTokenHead,
    Int8PerTokenHead,
    fold_zero_point,
    unfold,
)
from tests.quantizers.engine.golden import array, same


def test_int8_per_token_head_equals_the_engine():
    same(Int8PerTokenHead(), array("x"), "vllm/int8pth", ["scale"], offset=128)


def test_fp8_per_token_head_equals_the_engine():
    same(Fp8PerTokenHead(), array("x"), "vllm/fp8pth", ["scale"])


def test_fp8_equals_the_engine():
    same(Fp8(), array("x"), "vllm/fp8")


def test_int4_per_token_head_equals_the_engine():
    rotated = array("vllm/int4pth_fp32_rot")
    same(Int4PerTokenHead(), rotated, "vllm/int4pth_fp32", ["scale_stored_bits"], "_deq_rot")


def test_fp8_divides_by_its_scale_and_saturates():
    x = torch.tensor([[1000.0, -1000.0, 3.0, 0.4]])
    codes, params = Fp8(2.0).encode(x)
    assert params == ()
    assert Fp8(2.0).decode(codes, params, torch.float32).tolist() == [
        [896.0, -896.0, 3.0, pytest.approx(0.4, rel=0.07)]
    ]
    assert Fp8().decode(Fp8().encode(x)[0], (), torch.float32)[0, :2].tolist() == [448.0, -448.0]


def test_a_positive_group_saturates_because_its_zero_point_is_clamped():
    x = torch.linspace(100.0, 115.0, 16)[None]
    quantizer = Int4PerTokenHead()
    codes, params = quantizer.encode(x)
    assert codes.tolist() == [[15] * 16] and unfold(params[0])[1].tolist() == [[0]]
    assert quantizer.decode(codes, params, torch.float32).tolist() == [[15.0] * 16]


def test_a_zero_point_is_folded_into_a_scale_and_taken_out_again():
    scale, zero = torch.tensor([1.0, 0.3, 7e-7]), torch.tensor([0, 15, 9], dtype=torch.int32)
    cleared, found = unfold(fold_zero_point(scale, zero))
    assert torch.equal(found, zero) and bool((cleared <= scale).all()) and torch.allclose(cleared, scale, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantizer", [Int8PerTokenHead(), Fp8PerTokenHead(), Fp8(), Int4PerTokenHead()], ids=str)
def test_scales_are_fp32_and_values_in_the_dtype_of_the_model(quantizer, dtype):
    x = array("x")[:, 14:].to(dtype)
    codes, params = quantizer.encode(x)
    assert codes.dtype == torch.uint8 and [p.dtype for p in params] == [p.dtype for p in quantizer.parameters(dtype)]
    assert all(p.shape == (*x.shape[:-1], 1) for p in params)
    values = quantizer.decode(codes, params, dtype)
    error = (values.float() - x.float()).norm() / x.float().norm()
    assert values.dtype == dtype and error < (0.15 if quantizer.bits == 4 else 0.03)


def test_what_is_not_finite_is_refused():
    x = torch.ones(2, 3, 64)
    x[1, 2, 5] = float("inf")
    with pytest.raises(NonFiniteError, match=r"\(1, 2, 5\)"):
        Int8PerTokenHead().encode(x)
