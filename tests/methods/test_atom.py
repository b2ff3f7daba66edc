"""Atom: everything packed at once, per token and head."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.attention import reference
from kvbench.decoding.perplexity import decode_nll, forward_nll, simulated_nll
from kvbench.errors import CacheError, ConfigError
from kvbench.methods import load_method
from tests import slow, zoo
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)


@pytest.mark.parametrize("bits", [2, 4])
def test_attention_equals_a_slow_whole_tensor_statement(bits):
    method = load_method("atom", quantizer=f"int{bits}_token")
    keys, values = random_kv(1200)
    layer = new_layer(method)
    feed(layer, keys[:, :, :1100], values[:, :, :1100])
    for position in range(1100, 1199):
        feed(layer, keys[:, :, position : position + 1], values[:, :, position : position + 1])
    feed(layer, keys[:, :, 1199:], values[:, :, 1199:])
    query = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(5))
    got = reference.attend_reference(None, layer, query, None, 0.2)
    stored = [torch.cat([slow.atom(x[:, :, :1199], bits), x[:, :, 1199:]], 2) for x in (keys, values)]
    torch.testing.assert_close(got, slow.attention(query, *stored, 0.2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "pair"), [(torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 8)])
def test_the_bill_is_2_h_l_d_b_over_8_plus_s(dtype, pair):
    for bits in (2, 4):
        layer = new_layer(load_method("atom", quantizer=f"int{bits}_token"))
        feed(layer, *(x.to(dtype) for x in random_kv(77, channels=64)))
        feed(layer, *(x.to(dtype) for x in random_kv(3, channels=64, seed=1)))
        layer.settle()
        used = sum(n for store in layer.stores() for s in store.segments for n in s.used(0).values())
        assert used == 2 * 2 * 80 * (64 * bits // 8 + pair)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_the_authors_variant_equals_projections_that_quantize_in_the_models_own_forward_pass(architecture):
    """Keys before RoPE, and a prompt and steps that read what is stored; only the variant with both is that."""
    model = zoo.model(architecture)
    ids, _ = zoo.padded_batch([90], seed=2)

    def change(layer, side, x):
        return slow.atom(x.unflatten(1, (2, 64)), 2).flatten(1)

    with zoo.quantized_projections(model, change):
        expected = float(forward_nll(model, ids, 31))
    found = {}
    for rope in ("pre", "post"):
        for prefill in ("quantized", "exact"):
            method = load_method("atom", quantizer="int2_token", rope=rope, prefill=prefill)
            found[rope, prefill] = float(decode_nll(model, method.new_cache(model), ids, 31, prompt=30, chunk=9))
            method.detach(model)
    simulated = load_method("atom", quantizer="int2_token", rope="pre")
    assert float(simulated_nll(model, simulated.new_cache(model), ids, 31)) == pytest.approx(expected, rel=2e-5)
    assert found.pop(("pre", "quantized")) == pytest.approx(expected, rel=2e-5)
    assert all(abs(other - expected) > 1e-3 for other in found.values())


def test_keys_that_are_normalised_after_their_projection_are_seen_after_it():
    """Qwen3: what stands right before RoPE is k_norm's output; the first token's keys are compared with the cache's."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**zoo.ARCHITECTURE, head_dim=64)).eval()
    ids, _ = zoo.padded_batch([90])
    computed = [
        float(decode_nll(model, load_method("atom", rope=rope).new_cache(model), ids, 31, prompt=30, chunk=60))
        for rope in ("pre", "post")
    ]
    assert computed[0] == pytest.approx(computed[1], rel=0.02) and computed[0] != computed[1]
    expected = float(forward_nll(model, ids, 31))
    assert computed[0] == pytest.approx(expected, rel=0.02)


def test_packed_tokens_are_taken_back():
    """A token's form depends on itself alone: any number of the newest may go, the prompt's too."""
    layers = [new_layer(load_method("atom", quantizer="int4_token")) for _ in range(2)]
    keys, values = random_kv(200)
    for layer, stop in zip(layers, (130, 190), strict=True):
        feed(layer, keys[:, :, :stop], values[:, :, :stop])
    feed(layers[1], keys[:, :, 190:], values[:, :, 190:])
    layers[1].settle()
    layers[1].crop(-70)
    for layer in layers:
        feed(layer, keys[:, :, 10:15], values[:, :, 10:15])
        layer.settle()
    for mine, other in zip(*(layer.stores() for layer in layers), strict=True):
        assert torch.equal(
            mine.segments[0].read(ALL, 0, 135, torch.float32), other.segments[0].read(ALL, 0, 135, torch.float32)
        )
    with pytest.raises(CacheError, match="cannot take back 136 tokens"):
        layers[0].crop(-136)


def test_a_window_needs_an_exact_prefill():
    load_method("atom", window=64, sinks=4).check(64)
    with pytest.raises(ConfigError, match="window=64: needs method"):
        load_method("atom", window=64, prefill="quantized").check(64)
    with pytest.raises(ConfigError, match="window=-1"):
        load_method("atom", window=-1).check(64)


def test_quantizers_that_are_not_atoms_are_refused():
    with pytest.raises(ConfigError, match="atom does not accept this quantizer"):
        load_method("atom", quantizer="int2")
    formats = {
        "key": {"bits": 4, "group_size": 64, "axis": "token"},
        "value": {"bits": 4, "group_size": "head_dim", "axis": "token"},
    }
    with pytest.raises(ConfigError, match="one group per token and head"):
        load_method("atom", quantizer=formats).check(head_dim=128)


@pytest.mark.parametrize("side", ["key", "value"])
def test_groups_along_tokens_are_not_atoms(side):
    whole = {"bits": 4, "group_size": "head_dim", "axis": "token"}
    formats = {"key": whole, "value": whole, side: {"bits": 4, "group_size": 32, "axis": "channel"}}
    with pytest.raises(ConfigError, match=rf"quantizer\.{side}\.axis=channel: must be token"):
        load_method("atom", quantizer=formats)


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_group_may_be_the_number_of_channels(side):
    whole = {"bits": 4, "group_size": "head_dim", "axis": "token"}
    formats = {"key": whole, "value": whole, side: {"bits": 2, "group_size": 64, "axis": "token"}}
    method = load_method("atom", quantizer=formats)
    method.check(64)
    assert method.make_quantizer(side, 64).group_size is None and method.make_quantizer(side, 64).bits == 2
    with pytest.raises(ConfigError, match=rf"quantizer\.{side}\.group_size=64: must be head_dim"):
        method.check(128)


def test_what_is_stored_follows_from_rope_and_prefill():
    plain, authors = load_method("atom"), load_method("atom", rope="pre", prefill="quantized")
    traits = ("keys_before_rope", "quantized_prefill", "eager", "by_token")
    assert [getattr(plain, name) for name in traits] == [False, False, False, True]
    assert [getattr(authors, name) for name in traits] == [True] * 4
    windowed = load_method("atom", window=40)
    assert not windowed.by_token and [windowed.exact(n) for n in (0, 39, 40, 41, 90)] == [0, 39, 40, 40, 40]
    assert [plain.exact(n) for n in (0, 1, 90)] == [0, 0, 0]
