"""SGLang's fp4 and the integer formats of its forks: bit-equal to their kernels."""

import torch

from kvbench.quantizers.engine.sglang import MXBlock16, Ranged
from tests.quantizers.engine.golden import array, same


def test_int8_of_a_fork_equals_its_kernel():
    same(Ranged(8), array("x"), "sglang/int8fork", ["scale", "zero"])


def test_int4_without_rotation_equals_the_kernel():
    same(Ranged(4), array("x"), "sglang/int4", ["scale", "zero"])


def test_saw_int4_equals_the_kernel():
    same(Ranged(4, bf16=True), array("sglang/bdr16_rot_bf16"), "sglang/bdr16", ["scale", "zero"], "_deq_rot")


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
