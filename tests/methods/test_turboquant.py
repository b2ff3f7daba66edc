"""TurboQuant as a method: bytes by vLLM's layout, layers in full precision, what attends to what, and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.cache.segments.packed import PackedSegment
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.turboquant import FORMATS, TurboQuant, is_hybrid
from kvbench.quantizers.turboquant import LevelQuantizer, SketchQuantizer, TruncatingQuantizer, orthogonal, stored_codes
from tests.zoo import feed, new_layer, random_kv

#: bytes of a token's key and value in a head of 128 channels, in vLLM's slots
BYTES = {"k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102}
GOLDEN = Path(__file__).parents[1] / "golden" / "new" / "turboquant.npz"
RNG = torch.Generator().manual_seed(3)
IDS = torch.randint(0, 90, (1, 24), generator=RNG)


def tiny_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=100,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [64, 80, 128])
def test_the_bill_is_vllms_slot_to_the_byte(name, channels):
    method = load_method("turboquant", format=name, boundary=0)
    layer = new_layer(method)
    feed(layer, *(x.bfloat16() for x in random_kv(20, channels=channels)))
    feed(layer, *(x.bfloat16() for x in random_kv(3, channels=channels, seed=1)))
    layer.settle()
    used = sum(n for store in layer.stores() for s in store.segments for n in s.used(0).values())
    key, value = method.bits
    slot = channels * key // 8 + 2 * (key != 8) + channels * value // 8 + 4
    assert channels != 128 or slot == BYTES[name]
    assert used == 2 * 23 * slot
    assert kv_bytes(method, 23, layers=1, query_heads=4, heads=2, channels=channels).total == used


@pytest.mark.parametrize(
    ("layers", "boundary", "packed"), [(8, 2, [2, 3, 4, 5]), (8, 0, range(8)), (3, 2, [1]), (6, 1, [1, 2, 3, 4])]
)
def test_the_first_and_the_last_layers_stay_in_full_precision(layers, boundary, packed):
    method, model = load_method("turboquant", boundary=boundary), tiny_model(layers)
    cache = method.new_cache(model)
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)
    cache.settle_layers()
    computed = [
        n
        for n, layer in enumerate(cache.layers)
        if any(isinstance(segment, PackedSegment) for store in layer.stores() for segment in store.segments)
    ]
    assert computed == list(packed)
    formula = kv_bytes(method, 25, layers=layers, query_heads=2, heads=1, channels=64, width=4)
    assert cache.bill().used.total == formula.total
    method.detach(model)


def test_hybrid_models_have_no_layers_in_full_precision():
    assert is_hybrid({"layer_types": ["linear_attention", "full_attention"]})
    assert is_hybrid({"hybrid_override_pattern": "M-M*"}) and not is_hybrid({"layer_types": ["sliding_attention"]})
    assert is_hybrid({"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4})
    assert is_hybrid({"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [1]})
    assert is_hybrid({"model_type": "falcon_h1", "num_hidden_layers": 2}) and not is_hybrid({"num_hidden_layers": 2})
    method = TurboQuant()
    assert method.packs_in(2, 8) and not method.packs_in(1, 8)
    method.hybrid = True
    assert method.packs_in(0, 8)


def test_keys_are_rotated_and_values_are_not():
    for name, bits in FORMATS.items():
        layer = new_layer(load_method("turboquant", format=name, boundary=0))
        k, v = random_kv(16, channels=64)
        feed(layer, k, v)
        keys, values = layer.stores()
        assert (keys.packed.quantizer.bits, values.packed.quantizer.bits) == bits
        assert isinstance(values.packed.quantizer, TruncatingQuantizer)
        restored, _ = layer.unrotated(
            *(store.packed.read(slice(0, 1), 0, 16, torch.float32) for store in layer.stores())
        )
        assert float((restored - k).norm() / k.norm()) < {8: 0.04, 4: 0.11, 3: 0.21}[bits[0]]
        raw = keys.packed.read(slice(0, 1), 0, 16, torch.float32)
        assert (float((raw - k).norm() / k.norm()) > 1) == (bits[0] != 8)
        same = TruncatingQuantizer(bits[1])
        assert torch.equal(values.packed.read(slice(0, 1), 0, 16, torch.float32), same.quantize(v).dequantize())


@pytest.mark.parametrize("own", ["stored", "exact"])
def test_a_step_reads_its_own_token_as_it_is_stored(own):
    """With ``own=stored``, the token that a step attends to is the one that later steps attend to."""
    method, model = load_method("turboquant", format="3bit_nc", boundary=0, own=own), tiny_model(1)
    cache = method.new_cache(model)
    with torch.inference_mode():
        model(IDS[:, :-1], past_key_values=cache)
        first = model(IDS[:, -1:], past_key_values=cache).logits
        layer = cache.layers[0]
        assert layer.stores()[0].tail.lengths == [0 if own == "stored" else 1]
    method.detach(model)
    other = load_method("turboquant", format="3bit_nc", boundary=0, own="exact" if own == "stored" else "stored")
    cache = other.new_cache(model)
    with torch.inference_mode():
        model(IDS[:, :-1], past_key_values=cache)
        assert not torch.equal(first, model(IDS[:, -1:], past_key_values=cache).logits)
    other.detach(model)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("paper_")}


def test_the_papers_quantizers(golden):
    """Algorithms 1 (3 bits) and 2 (2 bits and a sketch), with the random matrices of the golden file."""
    pi, s, q, k = (golden[f"paper_{name}_D64"] for name in ("Pi", "S", "q", "k"))
    norm = k.norm(dim=-1, keepdim=True)
    y = k / norm @ pi.T
    levels = LevelQuantizer(3, "none")
    codes = levels.encode_unit(y)
    assert torch.equal(stored_codes(3).argsort()[codes.long()], golden["paper_mse3_codes_D64"].long())
    scores = q @ pi.T @ levels.decode(codes, (norm,), torch.float32).T
    wanted = golden["paper_mse3_scores_D64"]
    assert float((scores - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    sketch = SketchQuantizer(3, s @ pi.T)
    codes, length = sketch.encode_unit(y)
    assert torch.equal(stored_codes(2).argsort()[(codes >> 1).long()], golden["paper_prod3_codes_D64"].long())
    positive = torch.from_numpy(np.unpackbits(golden["paper_prod3_signs_D64"].numpy(), axis=-1))
    assert torch.equal(codes & 1, 1 - positive)
    assert torch.allclose(length[:, 0], golden["paper_prod3_gamma_D64"], rtol=1e-5)
    scores = q @ pi.T @ (sketch.decode_unit(codes, length) * norm).T
    wanted = golden["paper_prod3_scores_D64"]
    assert float((scores - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


def test_the_sketch_makes_scores_unbiased():
    """Levels alone shrink products with the key itself; with the sketch, the mean over projections is right."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(5))
    square = x.square().sum(-1)

    def ratio(quantizer):
        codes, params = quantizer.encode(x)
        return float(((quantizer.decode(codes, params, torch.float32) * x).sum(-1) / square).mean())

    assert ratio(LevelQuantizer(2, "none")) < 0.9
    for bits in (2, 3):
        assert abs(np.mean([ratio(SketchQuantizer(bits, seed=seed)) for seed in range(4)]) - 1) < 0.03 / (bits - 1)


def test_the_papers_version_as_a_method():
    options = {"format": "3bit_nc", "qjl": True, "nc_at": "none", "rotation.key": "random", "boundary": 0}
    layer = new_layer(load_method("turboquant", **options))
    feed(layer, *(x.bfloat16() for x in random_kv(20, channels=64)))
    keys, _ = layer.stores()
    assert isinstance(keys.packed.quantizer, SketchQuantizer)
    assert sum(keys.packed.used(0).values()) == 2 * 20 * (24 + 4)
    matrix = orthogonal(64, 0)
    assert torch.allclose(matrix @ matrix.T, torch.eye(64), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "5bit"}, "method.format=5bit"),
        ({"qjl": True}, "nc_at=none"),
        ({"qjl": True, "format": "k8v4", "nc_at": "none"}, "needs keys of 3 or 4 bits"),
        ({"boundary": -1}, "method.boundary=-1"),
        ({"nc_at": "never"}, "method.nc_at"),
        ({"rotation.key": "randomly"}, "method.rotation.key"),
        ({"window": 4, "prefill": "quantized"}, "method.window=4"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        load_method("turboquant", **options)


def test_common_exact_tokens():
    layer = new_layer(load_method("turboquant", boundary=0, sinks=4, window=8))
    feed(layer, *random_kv(40, channels=64))
    for store in layer.stores():
        assert [segment.lengths[0] for segment in store.segments] == [4, 28, 8]
