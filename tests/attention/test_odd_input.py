"""Odd input: order of reading, a reset while open, where a NaN was, models without attention."""

import json

import pytest
import torch
import transformers
from transformers import MambaConfig, MambaForCausalLM

from kvbench.attention import reference
from kvbench.cache import Prompts
from kvbench.cache.progress import Options
from kvbench.cache.segments.base import FullSegment
from kvbench.cache.store import Store
from kvbench.decoding import generate
from kvbench.errors import CacheError, ConfigError, ModelError, NonFiniteError
from kvbench.methods import load_method
from tests import zoo
from tests.zoo import feed, model, new_layer, padded_batch, random_kv


def test_without_reorder_attention_visits_run_by_run(monkeypatch):
    """``reorder=false`` is an ablation of what is stored where and of what attention does."""
    llama, (ids, _) = model("llama"), padded_batch([200])
    visits = {}
    for reorder in (True, False):
        method = load_method("cocktail", encoder="bm25", chunk_size=8, split=(10, 40, 50), reorder=reorder)
        cache = method.new_cache(llama, Prompts.from_batch(ids, decode=lambda ids: " ".join(map(str, ids))))
        seen, read = [], Store.read
        with monkeypatch.context() as patch:
            patch.setattr(Store, "read", lambda *a, seen=seen, read=read: (seen.append(a[2:4]), read(*a))[1])
            generate(llama, cache, ids, max_new_tokens=2)
        keys = seen[: len(seen) // len(cache.layers)][::2]  # of the first layer; values in between
        if not reorder:
            layer, row = cache.layers[0], slice(0, 1)
            runs = cache.progress.method_state.rows[0].runs(200)
            assert len(runs) > 10 and keys[:-1] == [(run.first, run.stop) for run in runs[:-1]]
            assert reference.slot_blocks(layer, row) == keys
        visits[reorder] = keys
    assert len(visits[True]) < 5 < len(visits[False])


def test_without_reorder_the_row_says_why_no_kernel_served():
    llama, (ids, _) = model("llama"), padded_batch([200])
    method = load_method("cocktail", encoder="bm25", chunk_size=8, split=(10, 40, 50), reorder=False)
    cache = method.new_cache(llama, Prompts.from_batch(ids, decode=lambda ids: " ".join(map(str, ids))))
    cache.options = Options(kernels="triton")
    generate(llama, cache, ids, max_new_tokens=2)
    assert {
        "reference",
        "packed",
        "reference (segments must be read in the order of the text, which a CPU's kernels do not support)",
    } <= cache.layers[0].paths
    method.detach(llama)


def test_reset_closes_an_open_prompt():
    llama, (ids, _) = model("llama"), padded_batch([150])
    cache = load_method("kivi").new_cache(llama)
    cache.open_prefill()
    llama(ids, past_key_values=cache)
    cache.reset()
    llama(ids, past_key_values=cache)
    assert all(layer.sealed for layer in cache.layers)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kivi", {"residual": 32, "sinks": 3}),
        ("logquant", {"window": 8}),
        ("partial_logquant", {"window": 8}),
        ("atom", {}),
    ],
)
def test_nan_of_a_decoded_token_is_named_by_its_own_position(name, settings, side):
    layer, tensors = new_layer(load_method(name, **settings)), random_kv(200, channels=64)
    tensors[side][0, 1, 100, 3] = float("nan")
    keys, values = tensors
    feed(layer, keys[:, :, :70], values[:, :, :70])
    side_name = ("key", "value")[side]
    with pytest.raises(NonFiniteError, match=f"in the {side_name} at position 100 "):
        for t in range(70, 200):
            feed(layer, keys[:, :, t : t + 1], values[:, :, t : t + 1])


def test_a_model_without_attention_is_refused():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ModelError, match="no attention heads"):
        load_method("fp16").new_cache(mamba)


def test_cocktails_value_groups_are_checked_before_the_prompt_runs():
    """phi3-mini has heads of 96 channels, which groups of 64 do not divide; where none is given one of 32 is taken."""
    with pytest.raises(ConfigError, match=r"method\.value_group_size=32"):
        load_method("cocktail", encoder="bm25", value_group_size=64).check(head_dim=96)
    for channels in (32, 64, 96, 128):
        load_method("cocktail", encoder="bm25").check(head_dim=channels)


def test_selected_rows_keep_where_their_windows_begin():
    keys, _ = random_kv(10, batch=2)
    window = FullSegment(2, 2, 32, keys.dtype, "cpu", capacity=16)
    window.append(slice(0, 2), keys)
    window.drop_front(slice(0, 1), 4)
    window.select(torch.tensor([1, 0]))
    assert torch.equal(window.view(slice(0, 1)), keys[1:])
    assert torch.equal(window.view(slice(1, 2)), keys[:1, :, 4:])


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Falcon", {}, "attention interface"),
        ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}, "MLA"),
    ],
)
def test_models_whose_attention_the_stores_cannot_serve_are_refused_at_once(name, settings, reason):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, **settings
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ModelError, match=reason):
        load_method("fp16").new_cache(model)
    assert model.config._attn_implementation != "kvbench"


@pytest.mark.parametrize("method", ["kivi", "logquant", "atom", "fp16"])
def test_latent_attention_is_said_before_anything_about_groups(method):
    """DeepSeek's head_dim is that of its rotary part: no group that would fit it would help."""
    settings = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=60, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, **settings
    )
    with pytest.raises(ModelError, match=r"latent attention \(MLA\)"):
        load_method(method).new_cache(transformers.DeepseekV3ForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bert", "attends to later tokens"),
        ("diffllama", "differential attention"),
        ("gemma3n_text", "the keys and values of another layer"),
        ("gemma4_text", "different head sizes"),
        ("hrm_text", "several times per token"),
    ],
)
def test_a_kind_that_is_not_served_is_named_before_a_token_is_run(kind, reason):
    """Without the refusal: logits that are wrong by thousandths (BERT), or errors of shapes from inside the model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind))
    with pytest.raises(ModelError, match=reason):
        load_method("kivi").new_cache(model)


def test_a_bert_that_is_a_decoder_is_served():
    numbers = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**numbers, intermediate_size=32, is_decoder=True)
    bert, ids = transformers.BertLMHeadModel(config).eval(), torch.arange(3, 40)[None]
    with torch.inference_mode():
        stock = bert(ids).logits
        cache = load_method("fp16").new_cache(bert)
        parts = [bert(part, past_key_values=cache).logits for part in (ids[:, :30], ids[:, 30:36], ids[:, 36:])]
    assert torch.allclose(torch.cat(parts, 1), stock, atol=1e-5)


def test_what_a_configuration_alone_tells_is_refused_from_it(tmp_path):
    """A folder's config.json is enough: no weight is looked for."""
    from kvbench.models.spec import ModelConfig

    for numbers, reason in (
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        (
            {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 15}},
            "the keys and values of another layer",
        ),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "no softmax attention"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4, **numbers}))
        for weights in ("pretrained", "random"):
            with pytest.raises(ConfigError, match=reason):
                ModelConfig(name="x", path=str(tmp_path), weights=weights, max_length=64).check()


def test_attention_weights_are_refused_and_not_left_out_in_silence():
    model, ids = zoo.model(), torch.arange(3, 20)[None]
    cache = load_method("fp16").new_cache(model)
    with pytest.raises(CacheError, match="output_attentions=True"):
        model(ids, past_key_values=cache, output_attentions=True)
    with pytest.raises(CacheError, match="output_attentions=True"):
        model.generate(
            ids,
            past_key_values=load_method("fp16").new_cache(model),
            output_attentions=True,
            return_dict_in_generate=True,
            max_new_tokens=2,
        )
    assert model(ids, past_key_values=load_method("fp16").new_cache(model)).logits.shape[1] == 17
