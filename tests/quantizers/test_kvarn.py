"""KVarN's quantizer against the authors' functions, and the errors that it is meant to lower."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import ConfigError, NonFiniteError
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.kvarn import KvarnQuantizer, balanced_factors, imbalance

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "new" / "kvarn.npz")
TAGS = sorted(key.removeprefix("codes_") for key in GOLDEN.files if key.startswith("codes_"))
BALANCED = sorted(key.removeprefix("s_col_") for key in GOLDEN.files if key.startswith("s_col_"))


def golden(tag: str) -> tuple[KvarnQuantizer, torch.Tensor]:
    """The quantizer and the rotated tiles of a case: ``K_b4_it8_D64_G128``."""
    side, bits, iterations, channels, tile = re.fullmatch(r"(K|V)_b(\d)_it(\d+)_D(\d+)_G(\d+)", tag).groups()
    axis = "channel" if side == "K" else "token"
    quantizer = KvarnQuantizer(int(bits), int(tile), axis, iterations=int(iterations))
    return quantizer, torch.from_numpy(GOLDEN[f"rot_D{channels}_G{tile}"])


@pytest.mark.parametrize("tag", TAGS)
def test_codes_and_parameters_equal_the_authors(tag):
    quantizer, x = golden(tag)
    codes, params = quantizer.encode(x)
    expected = torch.from_numpy(GOLDEN[f"codes_{tag}"]).to(torch.int16)
    expected = expected.transpose(1, 2) if tag[0] == "K" else expected
    difference = (codes.to(torch.int16) - expected).abs()
    assert difference.max() <= 1 and difference.float().mean() <= 1e-4
    for name, param in zip("AZC", params, strict=True):
        theirs = torch.from_numpy(GOLDEN[f"{name}_{tag}"])
        assert param.dtype == torch.float16
        steps = param.reshape(theirs.shape).view(torch.int16).int() - theirs.view(torch.int16).int()
        assert steps.abs().max() <= 1, name
    values = quantizer.decode(codes, params, torch.float32)
    errors = (values - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert torch.allclose(errors, torch.from_numpy(GOLDEN[f"relerr_{tag}"]), rtol=1e-5)


@pytest.mark.parametrize("tag", BALANCED)
def test_factors_equal_the_authors(tag):
    side, iterations, rest = re.fullmatch(r"(K|V)_it(\d+)_(D\d+_G\d+)", tag).groups()
    tiles = torch.from_numpy(GOLDEN[f"rot_{rest}"])
    tiles = tiles.transpose(1, 2) if side == "K" else tiles
    columns, rows = balanced_factors(tiles, int(iterations))
    measure = imbalance(tiles / columns / rows)
    for name, ours in (("s_col", columns), ("s_row", rows), ("imbalance", measure)):
        theirs = torch.from_numpy(GOLDEN[f"{name}_{tag}"])
        assert torch.allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5), name


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("channels", "tile", "bits", "rounds"), [(128, 128, 4, 8), (80, 64, 3, 16), (256, 64, 2, 1)])
def test_other_sizes_equal_a_restatement(channels, tile, bits, rounds, axis):
    """The golden tiles have 64 channels."""
    x = torch.randn(tile, channels, generator=torch.Generator().manual_seed(channels))
    x *= torch.randn(tile, 1, generator=torch.Generator().manual_seed(1)).exp()
    x[:, 5] *= 9
    x[3], x[7] = 0, 0.75
    m = x.T.contiguous() if axis == "channel" else x
    logs = [torch.zeros(1, m.shape[1]), torch.zeros(m.shape[0], 1)]
    best = (float("inf"), m, m)
    for step in range(rounds + 1):
        for side in range(2) if step else ():
            deviation = (m / logs[0].exp() / logs[1].exp()).std(side, keepdim=True).clamp(1e-3, 1e3)
            logs[side] = (logs[side] + deviation.log()).clamp(-0.3, 10)
        c, r = logs[0].exp(), logs[1].exp()
        spread = [(m / c / r).std(side) for side in range(2)]
        measure = sum(s.max() / s.min().clamp(min=1e-8) for s in spread)  # in fp32, where a zero row hides the others
        best = (measure, c, r) if measure <= best[0] else best
    _, c, r = best
    low, high = (m / c / r).aminmax(dim=1, keepdim=True)
    step_size = ((high - low) / (2**bits - 1)).clamp(min=1e-10)
    codes = ((m / c / r - low) / step_size).round().clamp(0, 2**bits - 1)
    wanted = (codes * (r * step_size).half().float() + (r * low).half().float()) * c.half().float()
    quantizer = KvarnQuantizer(bits, tile, axis, iterations=rounds)
    got, params = quantizer.encode(x)
    turned = (lambda y: y.T) if axis == "channel" else (lambda y: y)
    assert int((got != turned(codes)).sum()) <= 1e-4 * got.numel()
    decoded = quantizer.decode(got, params, torch.float32)
    assert float((decoded - turned(wanted)).abs().max()) <= 1e-3 * float(wanted.abs().max())


def test_the_state_of_least_imbalance_is_taken_even_if_it_is_the_first():
    torch.manual_seed(0)
    tile = torch.randn(4, 64, 128)
    tile /= tile.std(-1, keepdim=True)
    before = imbalance(tile)
    for iterations in (1, 2, 5):
        columns, rows = balanced_factors(tile, iterations)
        after = imbalance(tile / columns / rows)
        assert (after <= before).all()
        before = after
    extreme = torch.zeros(1, 8, 8)  # every factor is clipped, and no state is better than the first
    assert all((factor == extreme.new_tensor(-0.3).exp()).all() for factor in balanced_factors(extreme, 3))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Keys times the orthonormal Hadamard matrix."""
    h = torch.ones(1, 1)
    while len(h) < x.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x @ (h / len(h) ** 0.5)


def relative_error(quantizer: AffineQuantizer, x: torch.Tensor) -> float:
    """Norm of the rounding error over the norm of the tensor."""
    return float((quantizer.decode(*quantizer.encode(x), torch.float32) - x).norm() / x.norm())


@pytest.mark.parametrize(("bits", "plain", "turned", "kvarn"), [(2, 0.714, 0.696, 0.473), (4, 0.141, 0.139, 0.095)])
def test_errors_of_keys_with_outlier_channels_and_unequal_tokens(bits, plain, turned, kvarn):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, 128, generator=generator)
    x[..., 5] *= 8
    x[..., 70] *= 5
    x *= (0.5 * torch.randn(4, 1024, 1, generator=generator)).exp()
    y = rotated(x)
    grouped, balanced = AffineQuantizer(bits, 128, "channel"), KvarnQuantizer(bits, 128, "channel")
    measured = relative_error(grouped, x), relative_error(grouped, y), relative_error(balanced, y)
    assert measured == pytest.approx((plain, turned, kvarn), rel=0.03)
    # without iterations it is the plain quantizer, and a division by the token's size alone gains nearly as much
    assert relative_error(KvarnQuantizer(bits, 128, "channel", iterations=0), y) == pytest.approx(turned, rel=0.03)
    norm = relative_error(KvarnQuantizer(bits, 128, "channel", "norm"), y)
    assert measured[2] < norm < 1.02 * measured[2]


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_without_balance_the_error_is_at_most_half_a_step(axis):
    torch.manual_seed(0)
    x = torch.randn(2, 256, 64)
    quantizer = KvarnQuantizer(4, 128, axis, "none")
    result = quantizer.quantize(x)
    scale, _, cross = result.params
    assert (cross == 1).all()
    assert scale.shape == ((2, 2, 64) if axis == "channel" else (2, 256, 1))
    assert cross.shape == ((2, 256, 1) if axis == "channel" else (2, 2, 64))
    step = scale.repeat_interleave(128, 1) if axis == "channel" else scale
    assert ((result.dequantize() - x).abs() <= 0.51 * step.float() + 0.005).all()


def test_a_token_s_norm_is_its_cross_factor():
    torch.manual_seed(0)
    x = torch.randn(1, 64, 64)
    sizes = torch.linspace(-3, 3, 64).exp()[:, None]
    quantizer = KvarnQuantizer(4, 64, "channel", "norm")
    (codes, params), (scaled_codes, scaled) = quantizer.encode(x), quantizer.encode(x * sizes)
    assert torch.equal(codes, scaled_codes)
    assert torch.allclose(scaled[2].float(), params[2].float() * sizes, rtol=2e-3)
    assert torch.allclose(params[2].float(), x.norm(dim=-1, keepdim=True), rtol=1e-3)
    values = KvarnQuantizer(4, 64, "token", "norm")
    plain = KvarnQuantizer(4, 64, "token", "none")
    assert (values.encode(x)[1][2] == 1).all()  # values are rounded per token, so their size is in the scale
    assert torch.allclose(*(q.decode(*q.encode(x), torch.float32) for q in (values, plain)), atol=5e-3)


def test_quantiles_clip_the_ends_of_each_row():
    torch.manual_seed(0)
    x = torch.randn(3, 128, 64)
    quantizer = KvarnQuantizer(2, 128, "channel", "none", quantile=0.05)
    values = quantizer.decode(*quantizer.encode(x), torch.float32)
    ends = torch.quantile(x, torch.tensor([0.05, 0.95]), dim=1)
    assert torch.allclose(values.amin(1), ends[0], atol=2e-3)
    assert torch.allclose(values.amax(1), ends[1], atol=4e-3)


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(ConfigError, match="does not divide the 100 tokens"):
        KvarnQuantizer(4, 64, "token").encode(torch.zeros(100, 64))
    x = torch.zeros(2, 64, 64)
    x[1, 3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\(1, 3, 5\)"):
        KvarnQuantizer(4, 64, "channel").encode(x)


def test_parameters_beyond_fp16_become_its_largest_numbers():
    x = torch.full((64, 64), 6e4, dtype=torch.float32)
    x[::2] = -6e4
    for axis in ("channel", "token"):
        result = KvarnQuantizer(2, 64, axis).quantize(x.half())
        assert all(torch.isfinite(param).all() for param in (*result.params, result.dequantize()))


def test_groups_are_tiles_of_tokens_or_whole_heads():
    """On either axis a tile of tokens is encoded together."""
    keys, values = (KvarnQuantizer(4, 64, axis) for axis in ("channel", "token"))
    assert (keys.group_size, keys.block_tokens) == (64, 64) and (values.group_size, values.block_tokens) == (None, 64)
    assert (keys.balance, keys.iterations, keys.quantile) == ("kvarn", 8, 0.0)
    shown = "KvarnQuantizer(bits=4, tile=64, axis='token', balance='kvarn', iterations=8, quantile=0.0)"
    assert repr(values) == shown
