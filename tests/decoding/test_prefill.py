"""Prefill of every method: live tensors besides the store, and long padded batches without a mask of T x T."""

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

from kvbench.attention import observe, over_stores, prefill, reference, register
from kvbench.cache import Prompts
from kvbench.cache.segments import codebook as nuq
from kvbench.cache.segments import interface as segments
from kvbench.cache.segments import packed
from kvbench.decoding import generate
from kvbench.methods import load_method
from kvbench.profiling.memory import TensorCensus
from tests import zoo
from tests.contract.test_methods import LENGTHS, MISSING, PLAIN, VARIANTS, answer, make

#: transformers' own quantized cache quantizes a whole layer in fp32; steps of variants that only differ later are left
#: out, as are KVQuant's calibrations, which are of other shapes (tests/methods/test_kvquant.py)
FOREIGN = {"hf_quantized", "kvquant", "kvquant:authors", "h2o:max", *MISSING}
METHODS = ["atom", "cocktail", "fp16", "h2o", "kivi", "logquant", "partial_logquant", "quantspec", "snapkv"]
METHODS += ["streamingllm", *(name for name in VARIANTS if name not in FOREIGN and not name.startswith("kivi:"))]
HEADS, CHANNELS, TOKENS = 4, 128, 1024


@pytest.fixture
def scaled(monkeypatch):
    """Blocks in proportion: a 128k prompt of a 7B model is encoded in blocks of a sixty-fourth, of scores a fourth."""
    monkeypatch.setattr(packed, "ENCODED", 128)  # groups of 128 tokens are not cut
    monkeypatch.setattr(nuq, "ENCODED", 32)
    monkeypatch.setattr(segments, "GATHERED", 128)
    monkeypatch.setattr(over_stores, "QUERIES", 64)
    monkeypatch.setattr(reference, "BLOCK", 64)
    monkeypatch.setattr(reference, "ELEMENTS", 1)
    monkeypatch.setattr(observe, "SCORES", {"cpu": 1 << 15})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HEADS * CHANNELS,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize("name", METHODS)
def test_beside_the_store_a_prefill_needs_its_output_and_one_layer_at_most(name, model, scaled):
    """Counted from where attention receives a layer's fresh keys and values until it has placed them."""
    method, side = make(name, None), HEADS * CHANNELS * TOKENS * 2
    if name == "quantspec:draft":
        method.sensitive_layers = 0  # the model has a single layer
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    prompts = Prompts.from_batch(ids, None, decode=lambda ids: " ".join(map(str, ids)))
    cache = method.new_cache(model, prompts, max_length=TOKENS + 4)
    seen = {}

    def watched(module, query, key, *others, **more):
        entry, fresh = census.current, not key.layer.sealed
        if fresh:
            census.phase("attention")
        out = register.model_attention(module, query, key, *others, **more)
        if fresh:
            census.phase("end")
            stored = sum(
                buffer.untyped_storage().nbytes()
                for layer in key.layer.chain()
                for segment in layer.segments()
                for _, buffer in segment.buffers()
            )
            seen["most"] = census.peaks["attention"] - entry - stored
            seen["after"] = census.current - entry - stored
        return out

    AttentionInterface.register(register.NAME, watched)
    try:
        with TensorCensus() as census:
            generate(model, cache, ids, max_new_tokens=1)
    finally:
        register.register()
        method.detach(model)
    assert seen["most"] < side + 2 * side  # the output and one layer's keys and values
    assert seen["after"] < 0  # these are gone, the output is there


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_padding_in_place_of_a_mask_changes_nothing(name, quantizer, monkeypatch):
    model, method = zoo.model("llama"), make(name, quantizer)
    ids, mask = zoo.padded_batch(LENGTHS)
    answers = [[5, 9, 11], [7], [3, 4, 5, 6]]
    masked, before = answer(method, model, ids, mask, answer_ids=answers, max_new_tokens=4)
    monkeypatch.setattr(prefill, "MASK", 1)
    monkeypatch.setattr(register, "sdpa_mask", refuse_squares(register.sdpa_mask))
    bare, after = answer(method, model, ids, mask, answer_ids=answers, max_new_tokens=4)
    assert bare.tokens == masked.tokens
    assert [nll for nll, _ in bare.answer_nll] == pytest.approx([nll for nll, _ in masked.answer_nll], rel=1e-5)
    assert after.bill().used == before.bill().used


def refuse_squares(make_mask):
    def made(**kwargs):
        out = make_mask(**kwargs)
        assert out is None or out.shape[-2] < max(LENGTHS)
        return out

    return made


def test_padding_stands_for_a_mask_with_any_cache(monkeypatch):
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([60, 100, 100, 81])
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache()).logits
        method.new_cache(model)
        monkeypatch.setattr(prefill, "MASK", 1)
        ours = model(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache()).logits
        without = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    method.detach(model)
    for row, length in enumerate([60, 100, 100, 81]):
        torch.testing.assert_close(ours[row, -length:], stock[row, -length:])
        torch.testing.assert_close(without[row, -length:], stock[row, -length:])


def test_padding_stands_for_no_other_mask(monkeypatch):
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    monkeypatch.setattr(prefill, "MASK", 1)
    real = torch.ones(2, 8, dtype=torch.long)
    real[0, :3] = 0
    asked = {
        "q_length": 8,
        "kv_length": 8,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": real,
        "allow_is_causal_skip": True,
    }
    assert torch.equal(prefill.padding(asked), real.bool())
    right = real.flip(1)
    for change in (
        {"mask_function": sliding_window_causal_mask_function(4)},
        {"allow_is_causal_skip": False},
        {"q_length": 4, "q_offset": 4},
        {"attention_mask": right},
        {"attention_mask": torch.ones_like(real)},
        {"attention_mask": None},
    ):
        assert prefill.padding({**asked, **change}) is None
    monkeypatch.setattr(prefill, "MASK", 2 * 8 * 8 + 1)
    assert prefill.padding(asked) is None


@pytest.mark.parametrize("padded", [False, True])
def test_grouped_heads_are_not_repeated(padded, monkeypatch):
    """Keys and values of grouped-query attention reach SDPA as they are, with padding too."""
    model, shapes, real = zoo.model("llama"), [], torch.nn.functional.scaled_dot_product_attention

    def look(query, key, *others, **more):
        shapes.append((query.shape[1], key.shape[1], key.shape[2], more["attn_mask"]))
        return real(query, key, *others, **more)

    monkeypatch.setattr(prefill, "MASK", 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    ids, mask = zoo.padded_batch([40, 64] if padded else [64])
    answer(load_method("fp16"), model, ids, mask, max_new_tokens=1)
    assert shapes == [(4, 2, n, None) for _ in range(2) for n in ((40, 64) if padded else (64,))]


class Grouped(torch.nn.Module):
    """The attributes of an attention module that transformers' SDPA reads."""

    is_causal, num_key_value_groups = True, 2


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_long_prompts_are_served_by_the_fastest_back_end_and_by_torchs_own_alike(padded):
    generator = torch.Generator("cuda").manual_seed(0)
    count = prefill.LONG
    query, keys, values = (
        torch.randn(2, count, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (4, 2, 2)
    )
    real = torch.ones(2, count, dtype=torch.bool, device="cuda")
    real[0, :1000] = False
    found, served = {}, {}
    mask = real if padded else None
    for backend in ("auto", "stock"):
        found[backend], served[backend] = prefill.attend_prompt(Grouped(), query, keys, values, mask, None, {}, backend)
    torch.testing.assert_close(found["auto"], found["stock"], atol=1e-2, rtol=2e-2)
    newest = query[0, :2, -1:].float() @ keys[0, 0].float().T * 128**-0.5  # two heads of one group
    if padded:
        newest[..., :1000] = float("-inf")
        assert not found["auto"][0, :1000].any()
    exact = torch.softmax(newest, -1) @ values[0, 0].float()
    torch.testing.assert_close(found["auto"][0, -1, :2].float(), exact[:, 0], atol=1e-2, rtol=2e-2)
    assert served["stock"] == "sdpa"
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert served["auto"] == ("sdpa:cudnn" if hopper else "sdpa")
