"""KVQuant: against a forward pass whose projections are quantized, its bill, its calibration, and what it refuses."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvbench.attention.rope import rotary
from kvbench.calibration import file
from kvbench.cli.calibrate import model_config
from kvbench.decoding import generate
from kvbench.decoding.perplexity import decode_nll, exact_chunk, forward_nll, simulated_nll
from kvbench.errors import CacheError, ConfigError, ModelError, NonFiniteError
from kvbench.methods import load_method
from kvbench.models.projections import attentions
from kvbench.util.attachment import Placement, record_placement
from tests import slow, zoo
from tests.zoo import feed, new_layer, random_kv

ROWS = slice(0, 1)


def kvquant(*names: str, **changes):
    return load_method("kvquant", **{"calibration": zoo.calibrations(*names), "outliers": 0.05, **changes})


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "phi3"])
def test_the_cache_equals_projections_that_quantize_in_the_models_own_forward_pass(architecture):
    """As KVQuant's authors simulate it; prompt, steps of seven tokens, first tokens exact."""
    model, first = zoo.model(architecture), 2
    method = kvquant(architecture, bits=3, first_tokens=first, prefill="quantized")
    ids, _ = zoo.padded_batch([80], seed=3)
    found = [decode_nll(model, method.new_cache(model), ids, 41, prompt=40, chunk=7)]
    found.append(simulated_nll(model, method.new_cache(model), ids, 41))
    found.append(decode_nll(model, method.new_cache(model), ids, 41, prompt=1, chunk=79))
    method.detach(model)
    loaded = file.load_calibration(Path(zoo.calibrations(architecture)) / f"{architecture}-5pct.safetensors")

    def change(layer, side, x):
        levels = loaded.levels(layer, side, 3)
        if side == "key":
            out = slow.kvquant_keys(x, loaded.thresholds(layer), levels, True)
        else:
            out = slow.kvquant_values(x, levels, 0.05)
        return torch.cat([x[:first], out[first:]])

    with zoo.quantized_projections(model, change):
        expected = forward_nll(model, ids, 41)
    exact = forward_nll(model, ids, 41)
    assert abs(float(exact - expected)) > 1e-2
    for nll in found:
        assert float(nll) == pytest.approx(float(expected), rel=2e-5)


def test_an_exact_prompt_is_stocks_and_chunks_of_steps_change_nothing():
    model, method = zoo.model("llama"), kvquant("llama")
    ids, _ = zoo.padded_batch([90])
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=method.new_cache(model), use_cache=True).logits
        method.detach(model)
        assert torch.equal(logits, model(input_ids=ids).logits)
    assert exact_chunk(method, 16) == 16
    one, many = (decode_nll(model, method.new_cache(model), ids, 31, prompt=30, chunk=c) for c in (1, 16))
    assert float(one) == pytest.approx(float(many), rel=1e-5)
    assert float(one) != pytest.approx(float(forward_nll(model, ids, 31)), rel=1e-4)


def test_positions_are_those_that_the_model_was_given():
    """Position ids that jump, in one pass with quantized projections and through the cache in three."""
    model = zoo.model("llama")
    method = kvquant("llama", prefill="quantized")
    ids, _ = zoo.padded_batch([60])
    positions = torch.cat([torch.arange(5, 30), torch.arange(300, 320), torch.arange(100, 115)])[None]
    cache = method.new_cache(model)
    outs = []
    with torch.no_grad():
        for part in (slice(0, 27), slice(27, 28), slice(28, 60)):
            outs.append(model(input_ids=ids[:, part], position_ids=positions[:, part], past_key_values=cache).logits)
        whole = method.new_cache(model)
        expected = model(input_ids=ids, position_ids=positions, past_key_values=whole).logits
        shifted = model(input_ids=ids, past_key_values=method.new_cache(model)).logits
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(shifted, expected, atol=1e-3)
    assert [column for column, _ in cache.progress.positions.runs[0]] == [0, 25, 45]


@pytest.mark.parametrize(
    ("dtype", "pair", "element"), [(torch.bfloat16, 4, 2), (torch.float16, 4, 2), (torch.float32, 8, 4)]
)
@pytest.mark.parametrize(("bits", "share", "first"), [(4, 0.05, 0), (3, 0.05, 5), (4, 0.0, 0)])
def test_the_bill_to_the_byte(dtype, pair, element, bits, share, first):
    heads, channels = 2, 64
    layer = new_layer(kvquant("llama", bits=bits, outliers=share, first_tokens=first, calibration=one_file(share)))
    keys, values = (x.to(dtype) for x in random_kv(77, channels=channels))
    feed(layer, keys, values)
    feed(layer, *(x.to(dtype) for x in random_kv(3, channels=channels, seed=1)))
    layer.settle()
    packed = 80 - first
    kept = sum(store.segments[-2].exact.count(0) if share else 0 for store in layer.stores())
    loaded = file.load_calibration(Path(one_file(share)))
    if share:
        flat = torch.cat([keys, random_kv(3, channels=channels, seed=1)[0].to(dtype)], 2)[0, :, first:]
        upper, lower = loaded.thresholds(0).float().unflatten(1, (heads, 1, channels))
        outside = int(((flat.float() > upper) | (flat.float() < lower)).sum())
        # of 128 values a token, those beyond the interpolated 2.5 and 97.5 per cent: 4 on each side, more in a tie
        assert outside + 8 * packed <= kept <= outside + 8 * packed + (0 if dtype == torch.float32 else 40)
    expected = {
        "codes": 2 * heads * packed * channels * bits // 8,
        "scales": packed * pair + 2 * 2 * heads * channels + 2 * 4 * 2**bits,
        "window": 2 * heads * first * channels * element + kept * element,
        "index": 2 * kept,
    }
    used = {"codes": 0, "scales": 0, "window": 0, "index": 0}
    for store in layer.stores():
        for segment in store.segments:
            for part, count in segment.used(0).items():
                used[part] += count
    assert used == expected


def one_file(share: float = 0.05) -> str:
    return str(Path(zoo.calibrations("llama")) / f"llama-{100 * share:g}pct.safetensors")


def test_without_outliers_a_channel_and_a_token_have_so_many_levels():
    layer = new_layer(kvquant("llama", bits=3, outliers=0.0, calibration=one_file(0.0)))
    feed(layer, *random_kv(300, channels=64))
    keys, values = (store.segments[0].read(ROWS, 0, 300, torch.float32) for store in layer.stores())
    assert slow.levels(keys.transpose(-1, -2)) == 8
    assert slow.levels(values.transpose(1, 2).flatten(2)) == 8  # one range over all heads of a token


def test_q_norm_restores_mean_and_deviation():
    plain, normed = (new_layer(kvquant("llama", bits=3, q_norm=q, calibration=one_file())) for q in (False, True))
    loaded = file.load_calibration(Path(one_file()))
    keys, values = random_kv(50, channels=64)
    reads = []
    for layer in (plain, normed):
        feed(layer, keys, values)
        segment = layer.stores()[1].segments[0]
        reads.append((segment.codes(ROWS, 0, 50), segment.read(ROWS, 0, 50, torch.float32), segment.params))
    assert torch.equal(reads[0][0], reads[1][0])
    levels = loaded.levels(0, "value", 3)
    scale, offset = loaded.norm(0, "value", 3)
    assert float(scale) > 1
    by, base = (p[0, :50, None, None] for p in reads[0][2])
    codes = reads[0][0][0].transpose(0, 1).long()
    for read, table in zip(reads, (levels, levels * scale + offset), strict=True):
        coded = (table[codes] * by + base).transpose(0, 1)
        exact = read[1][0] == values[0]
        assert torch.equal(torch.where(exact, read[1][0], coded), read[1][0]) and 0 < exact.sum() < 0.2 * exact.numel()


def test_any_number_of_tokens_is_taken_back():
    """Down into the prompt; what follows is as if the rest had never been."""
    model, method = zoo.model("llama"), kvquant("llama", first_tokens=2, prefill="quantized")
    ids, _ = zoo.padded_batch([80])
    plain, cut = method.new_cache(model), method.new_cache(model)
    with torch.no_grad():
        model(input_ids=ids[:, :33], past_key_values=plain)
        model(input_ids=ids[:, :60], past_key_values=cut)
        model(input_ids=ids[:, 50:80], past_key_values=cut)
        cut.crop(-57)
        outs = [model(input_ids=ids[:, 33:50], past_key_values=cache).logits for cache in (plain, cut)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert plain.bill().used == cut.bill().used


def test_it_drafts_for_quantspec():
    """A cache with keys before RoPE follows one with keys after it; the target's tokens stay what they are."""
    model = zoo.model("llama")
    ids, mask = zoo.padded_batch([150, 171])
    options = {"calibration": zoo.calibrations("llama"), "outliers": 0.05}
    tokens = []
    for changes in ({"gamma": 0}, {"gamma": 3, "draft": "kvquant", "draft_options": options}):
        method = load_method("quantspec", target="fp16", **changes)
        result = generate(model, method.new_cache(model), ids, mask, max_new_tokens=20)
        tokens.append(result.tokens)
    assert tokens[0] == tokens[1]
    rounds = result.rounds
    assert sum(sum(r.accepted) for r in rounds) > 0.5 * sum(sum(r.drafted) for r in rounds)


# -- what is refused --------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, info=None, tensors=None) -> str:
    path, made = tmp_path / "changed.safetensors", file.load_calibration(Path(one_file()))
    save_file({**made.tensors, **(tensors or {})}, path, {**made.info, **(info or {})})
    return str(path)


def test_without_a_calibration_it_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.model("llama")
    with pytest.raises(
        ConfigError, match=r"python -m kvbench.calibrate --model .* --text FILE --bits 4 --outliers 0.05"
    ):
        load_method("kvquant", outliers=0.05).new_cache(model)
    with pytest.raises(ConfigError, match=r"--out missing.safetensors"):
        load_method("kvquant", calibration="missing.safetensors")
    shutil.copytree(zoo.calibrations("llama"), tmp_path / "results" / "calibration")
    load_method("kvquant", outliers=0.05).new_cache(model)
    with pytest.raises(ConfigError, match=r"none for tiny-random .*llama(?s:.*)tiny --random --text"):
        load_method("kvquant", outliers=0.05).prepare(model_config("tiny", None, None, True))
    with pytest.raises(
        ConfigError, match=r"with 2 bits and 5% outliers in .*; the existing ones are .*3,4 bits, 5% outliers"
    ):
        load_method("kvquant", outliers=0.05, bits=2).new_cache(model)


def test_a_file_of_other_bits_or_another_share():
    model = zoo.model("llama")
    with pytest.raises(ConfigError, match=r"method.bits=2: .* contains only codebooks with 3,4 bits"):
        kvquant("llama", bits=2, calibration=one_file()).new_cache(model)
    with pytest.raises(ConfigError, match=r"method.outliers=0.01: .* was made with outliers=0.05"):
        kvquant("llama", outliers=0.01, calibration=one_file()).new_cache(model)


def test_a_file_of_another_model(tmp_path):
    method = kvquant("llama", calibration=one_file())
    with pytest.raises(ConfigError, match="another model, llama, which has the same shape but different weights"):
        method.new_cache(zoo.model("qwen2"))
    other = changed(tmp_path, {"layers": "1"})
    with pytest.raises(ConfigError, match="1 layers of 2 KV heads with 64 channels; this one has 2 layers"):
        kvquant("llama", calibration=other).new_cache(zoo.model("llama"))
    method.new_cache(zoo.model("llama", torch.bfloat16))  # rounded weights are the same model's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"info": {"format": "other"}}, "is not a calibration file"),
        ({"info": {"bits": "four"}}, "its metadata is incomplete"),
        ({"info": {"layers": "3"}}, "layers.2.key.thresholds is missing"),
        ({"tensors": {"layers.1.value.levels.4": torch.zeros(15)}}, r"levels.4 is not a finite tensor of shape \[16\]"),
        (
            {"tensors": {"layers.0.key.thresholds": torch.full((2, 128), torch.nan).half()}},
            "thresholds is not a finite",
        ),
    ],
)
def test_a_damaged_file(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        file.load_calibration(Path(changed(tmp_path, **change)))


def test_half_a_file_or_none(tmp_path, capsys):
    path = tmp_path / "half.safetensors"
    path.write_bytes(Path(one_file()).read_bytes()[:3000])
    with pytest.raises(ConfigError, match="damaged"):
        file.load_calibration(path)
    assert list(file.calibrations_in([tmp_path])) == []
    assert str(path) in capsys.readouterr().err
    assert load_file(one_file())["layers.0.key.thresholds"].dtype == torch.float16


def test_a_damaged_file_beside_a_good_one_is_passed_over_and_named(tmp_path, capsys):
    """Only where the folder is searched: by its path it is refused."""
    damaged = changed(tmp_path, {"layers": "3"})
    shutil.copy(one_file(), tmp_path / "good.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")  # of something else: nothing to say
    method = load_method("kvquant", outliers=0.05, calibration=str(tmp_path))
    for _ in range(2):
        cache = method.new_cache(zoo.model("llama"))
        assert cache.progress.method_state.path == tmp_path / "good.safetensors"
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"warning: {damaged} is damaged: layers.2.key.thresholds is missing; the file is ignored"
    with pytest.raises(ConfigError, match=r"layers\.2\.key\.thresholds is missing"):
        load_method("kvquant", outliers=0.05, calibration=damaged).new_cache(zoo.model("llama"))


def test_a_model_without_a_k_proj():
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(num_attention_heads=2, **sizes)).eval()
    with pytest.raises(ModelError, match="does not have k_proj or qkv_proj in each of its 2 attention layers"):
        load_method("atom", rope="pre").new_cache(model)
    with pytest.raises(ModelError, match="does not have k_proj or qkv_proj"):
        kvquant("llama").new_cache(model)


def test_a_model_that_does_more_to_its_keys():
    model, method = zoo.model("llama"), kvquant("llama")
    cache = method.new_cache(model)
    ids, _ = zoo.padded_batch([20])
    hook = attentions(model)[1].k_proj.register_forward_hook(lambda module, inputs, out: 1.5 * out)  # after kvbench's
    try:
        with (
            pytest.raises(
                ModelError, match="rotating the keys before RoPE does not give the keys that attention receives"
            ),
            torch.no_grad(),
        ):
            model(input_ids=ids, past_key_values=cache)
    finally:
        hook.remove()


def test_hooks_come_and_go():
    model, method = zoo.model("llama"), kvquant("llama")
    ids, _ = zoo.padded_batch([20])
    cache = method.new_cache(model)
    method.new_cache(model)
    method.detach(model)
    assert not any(attention.k_proj._forward_hooks for attention in attentions(model))
    other = load_method("fp16").new_cache(model)
    with pytest.raises(CacheError, match="keys before RoPE were not captured"), torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    method.new_cache(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=other)  # another method's cache beside it
    assert all(rotary.take(attention) is None for attention in attentions(model))
    method.detach(model)


@pytest.mark.parametrize("prefill", ["exact", "quantized"])
def test_nan_is_named_with_its_place(prefill):
    layer = new_layer(kvquant("llama", calibration=one_file(), prefill=prefill))
    keys, values = random_kv(30, channels=64)
    feed(layer, keys, values)
    keys[0, 1, 0, 7] = torch.nan
    layer.update(keys[:, :, :1], values[:, :, :1])
    layer.append(keys[:, :, :1], values[:, :, :1])
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in the key at position 30 \(row 0, KV head 1, channel 7\)"):
        layer.settle()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "method.bits=5"),
        ({"outliers": 0.9}, "method.outliers=0.9"),
        ({"first_tokens": -1}, "method.first_tokens=-1"),
        ({"outliers": 0.0, "cap_outliers": True}, "no effect without outliers"),
        ({"prefill": "some"}, "method.prefill=some"),
    ],
)
def test_values_that_cannot_run(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_method("kvquant", **changes)


def test_the_outliers_of_a_token_are_capped_on_either_side_of_its_keys():
    """Half of 5 per cent of 128 channels is 3.2: four, as in the authors' kernels."""
    for cap, wanted in ((True, [4, None]), (False, [None, None])):
        layer = new_layer(kvquant("llama", cap_outliers=cap, calibration=one_file()))
        feed(layer, *random_kv(3, channels=64))
        assert [store.segments[0].most for store in layer.stores()] == wanted


def test_hidden_tokens_leave_with_their_block_of_outliers():
    method, plain = kvquant("llama"), kvquant("llama", outliers=0.0)
    assert [method.unit(width) for width in (128, 1024, 4096)] == [128, 64, 32]
    assert plain.unit(128) == 32


def test_tensor_parallelism_is_known_to_the_layers_and_serves_no_cap():
    model = zoo.model.__wrapped__("llama")
    team = SimpleNamespace(rank=0, size=2, gather=lambda tensor, dim: tensor)
    record_placement(model, Placement(team=team))
    assert kvquant("llama").new_cache(model).progress.method_state.team is team
    with pytest.raises(ConfigError, match=r"method\.cap_outliers=true: counts a token's outliers over all heads"):
        kvquant("llama", cap_outliers=True).new_cache(model)
    record_placement(model, Placement())
    assert kvquant("llama", cap_outliers=True).new_cache(model).progress.method_state.team is None
