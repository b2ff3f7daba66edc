"""Formats of segments as kernels read them: what a kernel reads is what the quantizer stored."""

import pytest
import torch

from kvbench.attention.reads import describe_part
from kvbench.attention.rope.rotation_tables import NotServed
from kvbench.attention.synthetic import read_tokens
from kvbench.attention.work import Format
from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers.engine.llamacpp import Q8_0, Signed
from kvbench.quantizers.engine.vllm import NVFP4, Fp8, Fp8PerTokenHead, Int4PerTokenHead, Int8PerTokenHead

#: quantizer of a format, and the format in heads of 64 channels
FORMATS = [
    (Int8PerTokenHead(), Format("offset", 8, "token", 64, 0, "fp32")),
    (Fp8PerTokenHead(), Format("float", 8, "token", 64, 0, "fp32")),
    (Fp8(), Format("float", 8, "token", 64, 0, "")),
    (Fp8(0.25), Format("float", 8, "token", 64, 0, "")),
    (Int4PerTokenHead(), Format("folded", 4, "token", 64, 0, "fp32")),
    (Q8_0(), Format("offset", 8, "token", 32)),
    (Signed(4), Format("offset", 4, "token", 32)),
    (NVFP4(), Format("float", 4, "token", 16, 0, "e4m3")),
    (NVFP4(0.01, four=True), Format("float", 4, "token", 16, 0, "e4m3")),
]


def segment(quantizer, side, tokens=133):
    rng = torch.Generator().manual_seed(0)
    held = PackedSegment(1, 2, 64, torch.float32, "cpu", quantizer=quantizer, side=side)
    held.append(slice(None), torch.randn(1, 2, tokens, 64, generator=rng))
    return held


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("quantizer", "form"), FORMATS, ids=str)
def test_a_kernel_reads_what_the_quantizer_stored(quantizer, form, side):
    held = segment(quantizer, side)
    described = describe_part(held, 64)
    assert described.format == form
    values = read_tokens(described, side, 0, slice(None), 0, 133, 64)
    wanted = held.read(slice(None), 0, 133, torch.float32)[0]
    assert float((values - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())


def test_codes_and_parameters_that_no_kernel_reads_are_refused():
    with pytest.raises(NotServed, match="Signed"):
        describe_part(segment(Signed(5), "key"), 64)
