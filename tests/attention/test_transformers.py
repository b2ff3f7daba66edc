"""transformers' own generate() on kvbench caches: every decoding mode, exact where nothing is compressed."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from kvbench.cache import Prompts
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo
from tests.marks import fast

LENGTHS = [50, 75, 70]
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam sampled, two returned": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2},
    "two returned": {"do_sample": True, "num_return_sequences": 2},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.4},
}


def generate(model, ids, mask, **kwargs):
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, max_new_tokens=24, **kwargs)


#: every mode on one model; on those whose layers slide or join projections the mode that moves whole rows
STOCK = [(name, rows, mode) for name in zoo.MODELS for rows in (slice(1, 2), slice(0, 3)) for mode in MODES]


@pytest.mark.parametrize(
    ("name", "rows", "mode"),
    fast(STOCK, lambda case: case[0] == "llama" or case[1:] in ((slice(1, 2), "greedy"), (slice(0, 3), "beam"))),
    ids=lambda part: {"slice(1, 2, None)": "alone", "slice(0, 3, None)": "padded batch"}.get(str(part)),
)
def test_fp16_reproduces_stock_transformers(name, rows, mode):
    model, method = zoo.model(name), load_method("fp16")
    method.detach(model)
    ids, mask = (x[rows] for x in zoo.padded_batch(LENGTHS))
    stock = generate(model, ids, mask, **MODES[mode])
    try:
        cache = method.new_cache(model)
        ours = generate(model, ids, mask, past_key_values=cache, **MODES[mode])
    finally:
        method.detach(model)
    assert torch.equal(ours, stock)
    assert cache.get_seq_length() == ours.shape[1] - 1
    assert cache.path == "sdpa"
    assert not cache.reads_packed


@pytest.mark.parametrize("name", zoo.MODELS)
def test_other_caches_and_no_cache_run_as_before_while_attached(name):
    model, method = zoo.model(name), load_method("fp16")
    ids, mask = zoo.padded_batch(LENGTHS)
    stock = generate(model, ids, mask, do_sample=False)
    method.new_cache(model)
    try:
        assert torch.equal(generate(model, ids, mask, do_sample=False, past_key_values=DynamicCache()), stock)
        assert torch.equal(generate(model, ids, mask, do_sample=False, use_cache=False), stock)
    finally:
        method.detach(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "quantizer"),
    fast(itertools.product(zoo.MODELS, ["int2", "int8"]), lambda case: (case[0] == "llama") == (case[1] == "int8")),
)
def test_prefill_in_chunks_by_generate_equals_one_shot_when_the_cache_knows_the_prompt(name, quantizer):
    model, method = zoo.model(name), load_method("kivi", quantizer=quantizer, residual=32)
    ids, mask = zoo.padded_batch([129, 100])  # 129 = 4 * 32 + 1: the last chunk is a single token
    one = generate(model, ids, mask, do_sample=False, past_key_values=method.new_cache(model))
    cache = method.new_cache(model, Prompts.from_batch(ids, mask))
    chunked = generate(model, ids, mask, do_sample=False, past_key_values=cache, prefill_chunk_size=32)
    method.detach(model)
    assert torch.equal(one, chunked)


@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
def test_assisted_generation_rolls_our_cache_back(kind):
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int8", residual=32)
    ids, mask = zoo.padded_batch([90])
    extra = {"assistant_model": zoo.model("qwen2")} if kind == "assistant" else {"prompt_lookup_num_tokens": 4}
    cache = load_method("fp16").new_cache(model)
    assisted = generate(model, ids, mask, do_sample=False, past_key_values=cache, **extra)
    plain = generate(model, ids, mask, do_sample=False, past_key_values=load_method("fp16").new_cache(model))
    cache = method.new_cache(model)
    packed = generate(model, ids, mask, do_sample=False, past_key_values=cache, **extra)
    method.detach(model)
    assert torch.equal(assisted, plain)
    assert packed.shape == plain.shape
    assert cache.reads_packed


def test_a_second_turn_continues_the_cache():
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([60])
    cache = method.new_cache(model)
    first = generate(model, ids, mask, do_sample=False, past_key_values=cache)
    turn = torch.cat([first, zoo.padded_batch([9], seed=8)[0]], 1)
    second = generate(model, turn, torch.ones_like(turn), do_sample=False, past_key_values=cache)
    method.detach(model)
    assert torch.equal(second, generate(model, turn, torch.ones_like(turn), do_sample=False))


def test_a_cache_under_another_attention_says_what_to_do():
    model, method = zoo.model("llama"), load_method("kivi", residual=32)
    ids, _ = zoo.padded_batch([60])
    cache = method.new_cache(model)
    method.detach(model)
    with pytest.raises(CacheError, match=r"does not use kvbench's attention.*new_cache"):
        model(input_ids=ids, past_key_values=cache)


def test_padding_on_the_right_or_inside_is_refused():
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([60, 60])
    mask[0, 50:] = 0
    with pytest.raises(CacheError, match="padding_side='left'"):
        model(input_ids=ids, attention_mask=mask, past_key_values=method.new_cache(model))
    with pytest.raises(CacheError, match="padding_side='left'"):
        Prompts.from_batch(ids, mask)
    method.detach(model)


def test_rollback_past_what_has_moved_is_refused():
    """The exact tails can be given back, drafts that came with the prompt among them; nothing that was packed."""
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int4", residual=32)
    ids, _ = zoo.padded_batch([60])
    cache = method.new_cache(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(
            CacheError, match="cannot take back 29 tokens: in row 0 of layer 0, only the newest 28 can be removed"
        ):
            cache.crop(-29)
        cache.crop(-3)
        assert cache.get_seq_length() == 57
        model(input_ids=ids[:, :5], past_key_values=cache)
    cache.crop(-5)
    method.detach(model)


def test_a_longer_prompt_than_told_is_refused():
    model, method = zoo.model("llama"), load_method("fp16")
    ids, _ = zoo.padded_batch([60])
    cache = method.new_cache(model, Prompts.from_batch(ids[:, :40]))
    with pytest.raises(CacheError, match="made for a prompt of 40"):
        model(input_ids=ids, past_key_values=cache)
    method.detach(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_run(dtype):
    model, method = zoo.model("llama", dtype), load_method("kivi", quantizer="int4", residual=32)
    ids, mask = zoo.padded_batch(LENGTHS)
    out = generate(model, ids, mask, do_sample=False, past_key_values=method.new_cache(model))
    method.detach(model)
    assert out.shape[1] == ids.shape[1] + 24


def test_training_through_the_prefill_keeps_gradients():
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int4", residual=32)
    ids, _ = zoo.padded_batch([40])
    cache = method.new_cache(model)
    loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    method.detach(model)
    assert any(bool(g.abs().sum() > 0) for g in grads)
