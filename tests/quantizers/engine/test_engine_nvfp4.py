"""NVFP4 and its 4over6 variant: equal to the restated kernels, and their two ends."""

import numpy as np
import pytest
import torch

from kvbench.quantizers.engine.vllm import NVFP4
from tests.quantizers.engine.golden import DEQUANTIZED, array


@pytest.mark.parametrize("name", ["nvfp4", "4over6"])
def test_codes_and_scales_equal_the_stored_ones(name):
    quantizer, x = NVFP4(four=name == "4over6"), array("x")
    codes, (scale,) = quantizer.encode(x)
    stored, scales = array(f"nvfp4/{name}_g1_codes"), array(f"nvfp4/{name}_g1_scale")
    clear = torch.ones_like(scale, dtype=torch.bool)
    if name == "4over6":  # blocks whose two errors differ by rounding only
        close = np.unpackbits(array("nvfp4/4over6_g1_err_gap_small").numpy(), axis=-1)[..., : scale.shape[-1]]
        clear = torch.from_numpy(close == 0)
        picked = np.unpackbits(array("nvfp4/4over6_g1_picked4").numpy(), axis=-1)[..., : scale.shape[-1]]
        assert 0 < picked.sum() < picked.size
    assert clear.float().mean() > 0.5
    assert torch.equal(scale[clear], scales[clear])
    read = (clear & (scale != 0)).repeat_interleave(16, -1)
    assert torch.equal(codes[read], stored[read])
    values = quantizer.decode(codes, (scale,), torch.float32)[:, :DEQUANTIZED]
    assert torch.equal(values[read[:, :DEQUANTIZED]], array(f"nvfp4/{name}_g1_deq")[read[:, :DEQUANTIZED]])


def test_without_a_calibrated_factor_large_blocks_saturate_and_small_ones_vanish():
    x = torch.full((1, 48), 1e-4)
    x[0, :16], x[0, 16:32] = 5000.0, 100.0
    codes, params = NVFP4().encode(x)
    assert NVFP4().decode(codes, params, torch.float32)[0, ::16].tolist() == [2688.0, 96.0, 0.0]
    factor = 5000.0 / (6 * 448)
    values = NVFP4(factor).decode(*NVFP4(factor).encode(x), torch.float32)
    assert values[0, 0].item() == pytest.approx(5000.0)


def test_four_over_six_is_never_worse_in_a_block():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    errors = [(q.decode(*q.encode(x), torch.float32) - x).square().sum(-1) for q in (NVFP4(), NVFP4(four=True))]
    assert bool((errors[1] <= errors[0]).all()) and bool((errors[1] < errors[0]).any())
