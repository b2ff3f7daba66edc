"""Rounding inside the engines' attention: llama.cpp's own codes, sums and dot products, and formulas for the others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.quantizers.engine.arithmetic import Arithmetic, arithmetic_of
from kvbench.quantizers.engine.build import build
from kvbench.quantizers.engine.formats import ATTENDED, FORMATS, ON_CUDA

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "new" / "llamacpp_attention.npz")
QUERIES, KEYS = (torch.from_numpy(GOLDEN[name]) for name in ("queries", "keys"))
#: formats by what llama.cpp's CPU back end has them called in the golden file
ON_CPU = {"q8_0_cpu": "q8_0", **{name: name for name in ("q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")}}


def scores(form: str, rounding: Arithmetic, query: torch.Tensor) -> torch.Tensor:
    """The products of rounded queries with the decoded keys, and of what their sums lack with the keys' minima."""
    quantizer = build(FORMATS[form], "key", 64, 64)
    codes, params = quantizer.encode(KEYS)
    rounded = rounding.rounded(query)
    out, sums = rounded @ quantizer.decode(codes, params, torch.float32).T, rounding.sums(query, rounded)
    return out if sums is None else out + sums @ quantizer.minimum(params).T


def test_queries_are_llama_cpps_q8_0_bit_for_bit():
    blocks = torch.from_numpy(GOLDEN["q8_0"]).view(6, 2, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    expected = (blocks[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
    assert torch.equal(arithmetic_of(FORMATS["q4_0"], "engine").rounded(QUERIES), expected)
    assert not torch.equal(expected, QUERIES)


def test_sums_of_queries_are_llama_cpps_q8_1_bit_for_bit():
    blocks = torch.from_numpy(GOLDEN["q8_1"]).view(6, 2, 36)
    stored = blocks[..., 2:4].contiguous().view(torch.float16).float()[..., 0]
    rounding = arithmetic_of(FORMATS["q4_1"], "engine")
    rounded = rounding.rounded(QUERIES)
    lacking = rounding.sums(QUERIES, rounded)
    assert lacking is not None
    total = rounded.unflatten(-1, (2, 32)).sum(-1)
    assert torch.equal((total + lacking).half().float(), stored)
    assert not torch.equal(total.half().float(), stored)  # the scale in the sum is not the rounded one


@pytest.mark.parametrize("form", ON_CPU)
def test_scores_are_llama_cpps_dot_products(form):
    expected = torch.from_numpy(GOLDEN[f"dot_{ON_CPU[form]}"])
    size = QUERIES.norm(dim=1)[:, None] * KEYS.norm(dim=1)
    mine = scores(form, arithmetic_of(FORMATS[form], "engine"), QUERIES)
    assert ((mine - expected).abs() <= 2e-6 * size).all()
    assert ((scores(form, Arithmetic(), QUERIES) - expected).abs() > 2e-6 * size).any()  # queries as they are


def test_cuda_rounds_scaled_queries_and_adds_their_exact_sums():
    rounding = arithmetic_of(FORMATS["q5_1"], "engine_cuda", count=2)
    assert rounding.scaled and not rounding.by_query
    for block in range(2):
        x = QUERIES[:, 32 * block : 32 * block + 32].numpy()
        step = (np.abs(x).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
        codes = np.trunc(np.divide(x, step, out=np.zeros_like(x), where=step != 0) + np.copysign(np.float32(0.5), x))
        mine = rounding.rounded(QUERIES)[:, 32 * block : 32 * block + 32]
        torch.testing.assert_close(mine, torch.from_numpy(codes * step), rtol=1e-6, atol=0)
    rounded = rounding.rounded(QUERIES)
    sums = rounding.sums(QUERIES, rounded)
    assert sums is not None
    exact = QUERIES.unflatten(-1, (2, 32)).sum(-1)
    torch.testing.assert_close(rounded.unflatten(-1, (2, 32)).sum(-1) + sums, exact, rtol=1e-5, atol=1e-4)


def test_many_queries_on_cuda_are_of_16_bits_as_are_keys_and_values():
    rounding = arithmetic_of(FORMATS["q4_0"], "engine_cuda", count=3)
    assert rounding.stored == torch.float16 and rounding.scaled
    assert torch.equal(rounding.rounded(QUERIES), QUERIES.half().float())
    weights = torch.tensor([1.0, 1 / 3, 1e-9])
    assert torch.equal(rounding.weighed(weights), weights.half().float())


def test_fp8_queries_by_head_and_probabilities_times_256():
    scale = torch.tensor([0.5, 0.125])
    rounding = arithmetic_of(FORMATS["fp8"], "engine", scale=scale)
    query = QUERIES[:4].view(1, 4, 1, 64) / 8  # query heads 0 and 1 share the first KV head
    mine = rounding.rounded(query)
    for head in range(4):
        own = float(scale[head // 2])
        expected = (query[0, head] / own).clamp(-448, 448).to(torch.float8_e4m3fn).float() * own
        assert torch.equal(mine[0, head], expected)
    weights = torch.tensor([1.0, 0.3, 2.0**-17, 2.0**-19])
    expected = (weights * 256).to(torch.float8_e4m3fn).float() / 256
    assert torch.equal(rounding.weighed(weights), expected) and expected[2] > 0 and expected[3] == 0


def test_ultraquant_rounds_probabilities_to_bf16():
    rounding = arithmetic_of(FORMATS["ultraquant_4bit"], "engine")
    assert rounding.query == "e4m3"
    weights = torch.tensor([1.0, 0.3])
    assert torch.equal(rounding.weighed(weights), weights.bfloat16().float())


def test_every_format_is_computed_or_refused_by_name():
    for name, form in FORMATS.items():
        for attention, known in (("engine", ATTENDED), ("engine_cuda", ON_CUDA)):
            if name in known:
                arithmetic_of(form, attention)
            else:
                with pytest.raises(ConfigError, match=f"not .*{name}"):
                    arithmetic_of(form, attention)
