"""SGLang's fp4 and the integer formats of its forks: bit-equal to their kernels."""

import pytest
import torch

from kvbench.quantizers.engine.sglang import MXBlock16, Ranged
from tests.quantizers.engine.golden import array, same


def test_int8_of_a_fork_equals_its_kernel():
    same(Ranged(8), array("x"), "sglang/int8fork", ["scale", "zero"])


def test_int4_without_rotation_equals_the_kernel():
    same(Ranged(4), array("x"), "sglang/int4", ["scale", "zero"])


def test_saw_int4_equals_the_kernel():
    same(Ranged(4, bf16=True), array("sglang/bdr16_rot_bf16"), "sglang/bdr16", ["scale", "zero"], "_deq_rot")


@pytest.mark.parametrize("quantizer", [Ranged(8), Ranged(4), Ranged(4, bf16=True)], ids=repr)
@pytest.mark.parametrize("channels", [80, 96, 112])
def test_heads_of_no_power_of_two_are_those_of_the_kernels_padded_with_zeros(quantizer, channels):
    """Rows that are constant, all positive, all negative or far from 0 show whether 0 is in the range."""
    x = torch.randn(2, 8, channels, generator=torch.Generator().manual_seed(0))
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 3.5, x[:, 1].abs() + 0.1, -x[:, 2].abs() - 1, x[:, 3] + 1000
    codes, params = quantizer.encode(x)
    wanted, others = quantizer.encode(torch.nn.functional.pad(x, (0, 128 - channels)))
    assert torch.equal(codes, wanted[..., :channels])
    assert all(torch.equal(mine, other) for mine, other in zip(params, others, strict=True))
    top = 2**quantizer.bits - 1
    assert codes[:, 0].eq(top).all() and codes[:, 2].max() < top and codes[:, 3].min() > 0


def test_saw_int4_rounds_rotated_tokens_to_bf16():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    quantizer = Ranged(4, bf16=True)
    codes, params = quantizer.encode(x)
    wanted, others = quantizer.encode(x.bfloat16())
    assert torch.equal(codes, wanted) and torch.equal(params[0], others[0])
    assert not torch.equal(params[0], Ranged(4).encode(x)[1][0])


def test_fp4_with_blocks_of_16_equals_the_engine():
    same(MXBlock16(), array("x"), "sglang/fp4", ["scale_byte"])


def test_zeros_have_the_least_scale_and_ties_go_up():
    x = torch.zeros(2, 16)
    x[1, :4] = torch.tensor([6.0, 0.25, -0.25, -0.2])
    codes, (scale,) = MXBlock16().encode(x)
    assert scale.tolist() == [[94], [127]]
    assert codes[0].eq(0).all() and codes[1, :4].tolist() == [7, 1, 9, 8]
