"""Many architectures with tiny random weights: fp16 equals stock transformers, packed formats run and are billed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench.bench.prediction import CacheShape
from kvbench.cache import Prompts
from kvbench.decoding.passes import prefill
from kvbench.errors import ConfigError, ModelError
from kvbench.methods import load_method
from tests import architectures, zoo

LENGTHS, STEPS = [38, 20], 2
#: formats that pack groups of tokens, and token by token
METHODS: dict[str, dict[str, Any]] = {"kivi": {"quantizer": "int4", "residual": 32}, "atom": {}}
#: stock attention of models with sinks, and in older versions of those with a softcap, is not torch's SDPA
EAGER = ("gpt_oss", "gemma2")
ALL = [*architectures.ATTENTION, *architectures.HYBRID]


def logits(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits ``[1 + STEPS, B, V]`` of a prompt's last token and of given tokens after it, fed one by one."""
    steps = torch.randint(3, architectures.VOCABULARY, (len(ids), STEPS), generator=torch.Generator().manual_seed(1))
    positions, results = (mask.cumsum(-1) - 1).clamp(min=0), []
    for new in (ids, *steps.split(1, 1)):
        known = {"input_ids": new, "attention_mask": mask, "position_ids": positions[:, -new.shape[1] :]}
        with torch.no_grad():
            results.append(model(**known, past_key_values=cache, use_cache=True).logits[:, -1])
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = positions[:, -1:] + 1
    return torch.stack(results)


def formula(model: PreTrainedModel, method: Any, row: int) -> dict[str, int]:
    """The bytes of a row, predicted from the model's configuration alone: keys, values and states."""
    names = ("num_attention_heads", "hidden_size", "num_hidden_layers")  # gpt2's file has other ones
    shape = CacheShape.of({**model.config.to_dict(), **{name: getattr(model.config, name) for name in names}}, width=4)
    return vars(shape.bytes(method, LENGTHS[row] + STEPS, LENGTHS[row], width=4))


def check(name: str) -> None:
    """Compare fp16 with stock transformers on a padded batch, then run the packed methods and compare their bills."""
    model, exact = architectures.model(name), load_method("fp16")
    ids, mask = zoo.padded_batch(LENGTHS)
    stock = logits(model, DynamicCache(config=model.config), ids, mask)
    try:
        same = logits(model, exact.new_cache(model), ids, mask)
        torch.testing.assert_close(same[0], stock[0], rtol=0, atol=1e-6 if name in EAGER else 0)
        torch.testing.assert_close(same, stock, rtol=0, atol=1e-6)
        assert torch.equal(same.argmax(-1), stock.argmax(-1))
        for kind, options in METHODS.items():
            method = load_method(kind, **options)
            cache = method.new_cache(model)
            packed = logits(model, cache, ids, mask)
            assert packed.isfinite().all() and cache.reads_packed
            assert kind == "kivi" or not torch.equal(packed, stock)
            for row in range(len(LENGTHS)):
                assert vars(cache.bill(row).used) == formula(model, method, row)
    finally:
        exact.detach(model)


@pytest.mark.parametrize("name", ALL)
def test_fp16_equals_stock_and_packed_bytes_equal_their_formula(name):
    check(name)


def check_rotated(model: PreTrainedModel) -> None:
    """Compare fp16 in a rotated basis with fp16: the difference is rounding."""
    ids, mask = zoo.padded_batch(LENGTHS)
    methods = [load_method("fp16"), load_method("fp16", rotation={"key": "rht", "value": "hadamard"})]
    try:
        plain, rotated = (logits(model, method.new_cache(model), ids, mask) for method in methods)
        torch.testing.assert_close(rotated, plain, rtol=0, atol=1e-6)
        assert not torch.equal(rotated, plain)
    finally:
        methods[0].detach(model)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow  # all models: 8 s
def test_rotated_heads_give_the_logits_of_fp16(name):
    check_rotated(architectures.model(name))


@pytest.mark.parametrize("channels", [64, 80, 96, 128])
def test_rotated_heads_of_any_size_give_the_logits_of_fp16(channels):
    check_rotated(architectures.built("Qwen3", {"head_dim": channels}))


@pytest.mark.parametrize("name", architectures.REFUSED)
def test_what_is_refused_says_why(name):
    reason, stem, options = architectures.REFUSED[name]
    with pytest.raises(ModelError, match=f"{reason}.*; choose a model such as"):
        load_method("fp16").new_cache(architectures.built(stem, options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_beams_and_chunks_equal_stock(name):
    model, method = architectures.model(name), load_method("fp16")
    ids, mask = zoo.padded_batch(LENGTHS)
    ways = [{"max_new_tokens": 50}, {"max_new_tokens": 12, "num_beams": 3}]
    ways = [{"attention_mask": mask, "do_sample": False, "eos_token_id": None, **way} for way in ways]
    stock = [model.generate(ids, **way) for way in ways]
    try:
        for way, tokens in zip(ways, stock, strict=True):
            assert torch.equal(model.generate(ids, past_key_values=method.new_cache(model), **way), tokens)
        prompts = Prompts.from_batch(ids, mask)
        with torch.inference_mode():
            whole = prefill(model, method.new_cache(model, prompts), ids, mask)
            chunked = prefill(model, method.new_cache(model, prompts), ids, mask, chunk=16)
            torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)
    finally:
        method.detach(model)


#: every method without speculation, calibration or an encoder, with options for short prompts
EVERY: dict[str, dict[str, Any]] = {
    "fp16": {},
    "kivi": {"quantizer": "int2", "residual": 32},
    "logquant": {"window": 24},
    "partial_logquant": {"window": 24},
    "streamingllm": {"budget": 24, "position": "original"},
    "h2o": {"budget": 24},
    "snapkv": {"budget": 24, "window": 8},
    "atom": {"rope": "post"},
    "engine": {"format": "int8_per_token_head"},
    "turboquant": {"boundary": 0},
    "kvarn": {"quantizer": "k4v2_g128"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", ALL)
def test_every_method_runs(name, kind):
    model = architectures.model(name)
    method = load_method(kind, **EVERY[kind])
    ids, mask = zoo.padded_batch(LENGTHS)
    try:
        cache = method.new_cache(model)
        assert logits(model, cache, ids, mask).isfinite().all()
        for row in range(len(LENGTHS)):
            try:
                expected = formula(model, method, row)
            except ConfigError:
                continue  # a method without a formula
            assert vars(cache.bill(row).used) == expected
    finally:
        method.detach(model)
