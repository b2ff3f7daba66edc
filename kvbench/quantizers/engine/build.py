"""Construction of the quantizer for a format of an inference engine."""

from __future__ import annotations

from torch import Tensor

from kvbench.quantizers.engine.amd import UltraQuant, octave
from kvbench.quantizers.engine.base import TokenQuantizer
from kvbench.quantizers.engine.formats import EngineFormat
from kvbench.quantizers.engine.llamacpp import IQ4NL, Q8_0, Ranged, Signed
from kvbench.quantizers.engine.sglang import MXBlock16
from kvbench.quantizers.engine.sglang import Ranged as ForkRanged
from kvbench.quantizers.engine.vllm import NVFP4, Fp8, Fp8PerTokenHead, Int4PerTokenHead, Int8PerTokenHead
from kvbench.quantizers.spec import Side


def build(
    form: EngineFormat, side: Side, head_dim: int, rope_dim: int, *, scale: float | Tensor = 1.0, rotated: bool = False
) -> TokenQuantizer:
    """Return the quantizer of keys or of values in a format.

    Args:
        scale: the one scale of all keys or values of a layer, for the formats that have one (fp8, nvfp4); for fp8 also
            one per KV head, fp32 ``[H]``.
        rotated: True if this side is rotated before it is quantized; SAW-INT4 then rounds it to bf16.
    """
    if form.octave:
        return octave(form.name, head_dim, rope_dim)[0 if side == "key" else 1]
    match form.name:
        case "int8_per_token_head":
            return Int8PerTokenHead()
        case "fp8_per_token_head":
            return Fp8PerTokenHead()
        case "fp8":
            return Fp8(scale)
        case "int4_per_token_head":
            return Int4PerTokenHead()
        case "int8fork":
            return ForkRanged(8)
        case "saw_int4":
            return ForkRanged(4, bf16=rotated)
        case "fp4_mx_block16":
            return MXBlock16()
        case "nvfp4" | "nvfp4_4over6":
            assert not isinstance(scale, Tensor)
            return NVFP4(scale, four=form.name == "nvfp4_4over6")
        case "q8_0" | "q8_0_cpu":
            return Q8_0(even=form.name == "q8_0_cpu")
        case "q5_1" | "q4_1":
            return Ranged(int(form.name[1]))
        case "q5_0" | "q4_0":
            return Signed(int(form.name[1]))
        case "iq4_nl":
            return IQ4NL()
        case "ultraquant_4bit":
            return UltraQuant()
    raise AssertionError(f"format {form.name} has no quantizer")
