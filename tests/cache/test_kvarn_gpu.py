"""On a GPU: KVarN's packing kernel against its quantizer, many tiles in one launch."""

import pytest
import torch

from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers.kvarn import KvarnQuantizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = slice(None)


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize(
    ("side", "bits", "tile"), [("key", 4, 128), ("value", 2, 128), ("value", 4, 64), ("key", 3, 64)]
)
def test_tiles_packed_at_once_equal_those_of_the_quantizer(side: str, bits: int, tile: int, channels: int) -> None:
    """Tiles of 64 tokens share words with their neighbours, which other programs would pack at the same time."""
    generator = torch.Generator("cuda").manual_seed(bits)
    x = torch.randn(2, 4, 1024 + tile, channels, generator=generator, device="cuda")
    x *= (0.5 * torch.randn(2, 4, x.shape[2], 1, generator=generator, device="cuda")).exp()
    x[..., 5] *= 8
    x = x.half()
    quantizer = KvarnQuantizer(bits, tile, "channel" if side == "key" else "token")
    packed = PackedSegment(2, 4, channels, x.dtype, x.device, quantizer=quantizer, side=side)  # type: ignore[arg-type]
    for first, last in ((0, tile), (tile, x.shape[2])):
        packed.append(ALL, x[:, :, first:last])
    codes, params = quantizer.encode(x)
    difference = (packed.codes(ALL, 0, x.shape[2]) - codes.to(torch.int16)).abs()
    assert difference.max() <= 1 and difference.float().mean() <= 1e-4
    for stored, wanted in zip(packed.params, params, strict=True):
        steps = stored[:, :, : wanted.shape[2]].contiguous().view(torch.int16).int() - wanted.view(torch.int16).int()
        assert steps.abs().max() <= 1
