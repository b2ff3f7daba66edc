"""What every quantizer says that it stores is what it stores: parameters, planes of codes, and the value of code 0."""

import pytest
import torch

from kvbench.quantizers import AffineQuantizer, AtomQuantizer, HierarchicalQuantizer
from kvbench.quantizers.engine.amd import octave
from kvbench.quantizers.engine.build import build
from kvbench.quantizers.engine.formats import FORMATS
from kvbench.quantizers.kvarn import KvarnQuantizer
from kvbench.quantizers.oscar import OscarQuantizer
from kvbench.quantizers.turboquant import LevelQuantizer, SketchQuantizer, TruncatingQuantizer
from kvbench.quantizers.windowed import WindowedQuantizer

QUANTIZERS = {
    "affine by channel": AffineQuantizer(3, 32),
    "affine by token": AffineQuantizer(5, 32, "token"),
    "affine of 8 bits": AffineQuantizer(8, None, "token"),
    "atom": AtomQuantizer(6, 64, "token"),
    "hierarchical": HierarchicalQuantizer(64),
    "windowed": WindowedQuantizer(2, 96, 40),
    "kvarn keys": KvarnQuantizer(4, 96, "channel"),
    "kvarn values": KvarnQuantizer(2, 96, "token"),
    "oscar": OscarQuantizer(2, 0.9),
    "oscar fp32": OscarQuantizer(2, 0.9, scales="fp32"),
    "oscar bf16": OscarQuantizer(2, 0.9, scales="bf16", lloyd_max=True),
    "levels": LevelQuantizer(3),
    "truncating": TruncatingQuantizer(4),
    "sketch": SketchQuantizer(4),
    **{name: build(form, "key", 128, 128) for name, form in FORMATS.items()},
    **{f"{name} values": build(form, "value", 128, 128) for name, form in FORMATS.items() if form.octave},
    "octave of half a head": octave("octave_k3v3", 128, 64)[0],
    "octave without rope": octave("octave_k3v3", 128, 0)[0],
}
#: those whose codes count no distance from a minimum
WITHOUT_MINIMUM = ("levels", "sketch", "kvarn keys", "kvarn values", *(name for name in QUANTIZERS if "octave" in name))


def tokens() -> torch.Tensor:
    return torch.randn(2, 192, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_parameters_are_those_described(name, dtype):
    quantizer = QUANTIZERS[name]
    codes, params = quantizer.encode(tokens().to(dtype))
    described = quantizer.parameters(dtype)
    assert codes.dtype == torch.uint8 and codes.shape == (2, 192, 128)
    assert [(p.dtype, p.shape) for p in params] == [(d.dtype, (2, *d.shape(192, 128))) for d in described]
    assert all(quantizer.block_tokens % part.block_tokens == 0 for part in described)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_codes_are_split_into_the_planes_described_and_joined_again(name):
    quantizer = QUANTIZERS[name]
    codes, _ = quantizer.encode(tokens())
    planes = quantizer.split(codes)
    assert [plane.shape[-1] for plane in planes] == [channels for _, channels in quantizer.planes(128)]
    for plane, (width, _) in zip(planes, quantizer.planes(128), strict=True):
        assert plane.dtype == torch.uint8 and int(plane.max()) < 2**width
    assert torch.equal(quantizer.join(planes), codes)
    assert torch.equal(quantizer.join([plane.to(torch.int32) for plane in planes]), codes.to(torch.int32))
    assert int(codes.max()) < 2**quantizer.bits


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name not in WITHOUT_MINIMUM])
def test_the_minimum_is_the_decoded_value_of_code_0(name):
    quantizer = QUANTIZERS[name]
    codes, params = quantizer.encode(tokens())
    middle = 8 if name == "hierarchical" else 0  # its lower nibble counts from -8
    lowest = quantizer.decode(torch.full_like(codes, middle), params, torch.float32)
    minimum = quantizer.minimum(params)
    if quantizer.axis == "channel":
        wanted = lowest.unflatten(-2, (minimum.shape[-2], -1))[..., 0, :]
    else:
        wanted = lowest.unflatten(-1, (-1, quantizer.group_size or 128))[..., 0]
    rounded = 2**-7 if minimum.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(minimum.float().expand_as(wanted), wanted, rtol=rounded, atol=1e-6)
    assert minimum.shape == wanted.shape or not params


def test_the_groups_of_a_tile_lie_along_tokens_on_one_side_and_along_channels_on_the_other():
    keys, values = (KvarnQuantizer(4, 96, axis).parameters(torch.float32) for axis in ("channel", "token"))
    assert [(part.axis, part.group) for part in keys] == [("channel", 96), ("channel", 96), ("token", None)]
    assert [(part.axis, part.group) for part in values] == [("token", None), ("token", None), ("channel", 96)]


@pytest.mark.parametrize(
    ("quantizer", "shown"),
    [
        (LevelQuantizer(3, "write"), "LevelQuantizer(bits=3, correction='write')"),
        (TruncatingQuantizer(4), "TruncatingQuantizer(bits=4)"),
        (octave("octave_k3v4", 128, 64)[0], "Octave(bits=4, block=64, wide=64)"),
        (octave("octave_k3v3", 128, 64)[1], "Octave(bits=3, block=None, wide=None)"),
    ],
)
def test_quantizers_show_what_sets_them_apart(quantizer, shown):
    assert repr(quantizer) == shown


def test_the_arithmetic_of_kernels_is_named_by_the_format():
    kinds = {name: getattr(quantizer, "kind", "affine") for name, quantizer in QUANTIZERS.items()}
    assert {name for name, kind in kinds.items() if kind == "offset"} == {
        "int8_per_token_head",
        "q8_0",
        "q8_0_cpu",
        "q4_0",
    }
    assert {name for name, kind in kinds.items() if kind == "float"} == {
        "fp8",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
    }
    assert {name for name, kind in kinds.items() if kind == "iq4_nl"} == {"iq4_nl"}
    octaves = {name: kind for name, kind in kinds.items() if "octave" in name}
    mixed = "octave of half a head"  # keys of 4 and of 3 bits, which no kernel reads
    assert octaves.pop(mixed) == "engine" and set(octaves.values()) == {"octave"}
    assert [LevelQuantizer(3, how).kind for how in ("read", "write", "none")] == ["levels_read", "levels", "levels"]
    assert [OscarQuantizer(scales=how).kind for how in ("fp16", "bf16", "fp32")] == ["affine", "oscar", "oscar"]
