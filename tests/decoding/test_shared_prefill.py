"""One prefill for several methods: each cache is filled as its own prefill would fill it, and no other cache is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.decoding import generate, shared_prefill
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.shared_prefill import ReadPrompt, read_prompts, sharing_refusal
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import architectures, zoo

LENGTHS = [60, 44, 51]
METHODS: dict[str, dict[str, Any]] = {
    "kivi": {"quantizer": "int2", "residual": 32},
    "snapkv": {"budget": 24, "window": 8},
    "h2o": {"budget": 24},
    "fp16": {},
}
#: bytes of the keys and values of one token of the tiny model: 2 layers, 2 heads of 64 channels, fp32
TOKEN = 2 * 2 * 2 * 64 * 4


def caches(model: Any, prompts: Prompts) -> list[KVCache]:
    return [load_method(name, **options).new_cache(model, prompts) for name, options in METHODS.items()]


def batch(lengths: list[int] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, Prompts]:
    ids, mask = zoo.padded_batch(lengths, seed=3)
    return ids, mask, Prompts.from_batch(ids, mask)


def shared(**options: Any) -> tuple[list[KVCache], ReadPrompt]:
    model, (ids, mask, prompts) = zoo.model("llama"), batch()
    made = caches(model, prompts)
    return made, read_prompts(model, made, prompts, ids, mask, **options)


def held(cache: KVCache) -> list[Any]:
    """What a cache stores: bytes by part, and the places of tokens in each layer."""
    rows = range(len(LENGTHS))
    places = [[layer.positions(row).tolist() for row in rows] for layer in cache.kv_layers]
    return [cache.bill().used, cache.get_seq_length(), places]


def next_logits(model: Any, cache: KVCache, mask: torch.Tensor) -> torch.Tensor:
    """The logits of one more token of each row."""
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    return forward(model, cache, torch.tensor([[5], [6], [7]]), longer, mask.sum(-1, keepdim=True))


@pytest.mark.parametrize("options", [{}, {"rows": 1}, {"rows": 2}, {"chunk": 17}], ids=str)
def test_each_cache_is_filled_as_by_its_own_prefill(options: dict[str, Any]) -> None:
    model, (ids, mask, prompts) = zoo.model("llama"), batch()
    made, prompt = shared(**options)
    assert prompt.methods == len(METHODS) and prompt.seconds >= 0.0 and prompt.logits.shape == (3, zoo.VOCABULARY)
    for cache, alone in zip(made, caches(model, prompts), strict=True):
        with torch.inference_mode():
            logits = prefill(model, alone, ids, mask, **options)
            assert torch.equal(prompt.fill(cache), logits)
            assert cache.get_seq_length() == 60 and cache.progress.prefill.group is None
            assert cache.progress.prefill.path == alone.progress.prefill.path == prompt.path
            assert held(cache) == held(alone)
            assert torch.equal(next_logits(model, cache, mask), next_logits(model, alone, mask))


def test_decoding_goes_on_after_a_shared_prefill_and_counts_its_time() -> None:
    model, (ids, mask, prompts) = zoo.model("llama"), batch()
    made, prompt = shared()
    prompt.seconds = 1000.0
    for cache, alone in zip(made, caches(model, prompts), strict=True):
        wanted = generate(model, alone, ids, mask, max_new_tokens=5)
        found = generate(model, cache, ids, mask, max_new_tokens=5, prompt=prompt)
        assert found.tokens == wanted.tokens and found.ttft_s > 1000.0 > wanted.ttft_s
        prompt.forget(cache)


def test_a_state_of_fixed_size_is_copied_to_each_cache() -> None:
    model, (ids, mask, prompts) = architectures.model("falcon_h1"), batch([30, 21])
    methods = [load_method("fp16"), load_method("kivi", quantizer="int4", residual=32)]
    try:
        wanted = [generate(model, m.new_cache(model, prompts), ids, mask, max_new_tokens=3).tokens for m in methods]
        made = [method.new_cache(model, prompts) for method in methods]
        prompt = read_prompts(model, made, prompts, ids, mask)
        found = [generate(model, cache, ids, mask, max_new_tokens=3, prompt=prompt).tokens for cache in made]
        assert found == wanted
    finally:
        methods[0].detach(model)


def test_logits_belong_to_each_cache() -> None:
    made, prompt = shared()
    before = prompt.logits.clone()
    with torch.inference_mode():
        prompt.fill(made[0]).zero_()
    assert torch.equal(prompt.logits, before)


def test_a_cache_is_filled_once_and_only_if_the_prompt_was_read_for_it() -> None:
    model, (_, _, prompts) = zoo.model("llama"), batch()
    made, prompt = shared()
    with torch.inference_mode():
        prompt.fill(made[0])
        with pytest.raises(CacheError, match="once, and no other"):
            prompt.fill(made[0])
        with pytest.raises(CacheError, match="once, and no other"):
            prompt.fill(load_method("fp16").new_cache(model, prompts))
        prompt.forget(made[1])
        with pytest.raises(CacheError, match="once, and no other"):
            prompt.fill(made[1])
        prompt.fill(made[2])
        prompt.fill(made[3])


def test_what_is_kept_is_counted_once_and_forgotten_with_the_method_that_wanted_it() -> None:
    made, prompt = shared()
    cpu, meta = torch.device("cpu"), torch.device("meta")
    plain = 3 * 60 * TOKEN
    everything = prompt.nbytes(cpu)
    assert everything > plain and prompt.nbytes(meta) == 0
    sizes = []
    for cache in made:
        prompt.forget(cache)
        sizes.append(prompt.nbytes(cpu))
    kivi, snapkv, h2o, fp16 = sizes
    assert kivi == everything > snapkv > h2o == fp16 == plain  # two of the methods observe attention


def test_a_prompt_may_be_kept_on_another_device() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")  # tensors on the latter have no storage of their own
    _, prompt = shared(home=meta)
    assert prompt.nbytes(meta) > 0 and prompt.nbytes(cpu) == 0 and prompt.logits.device == cpu
    assert shared(home=cpu)[1].nbytes(cpu) == shared()[1].nbytes(cpu)


def test_the_prompt_is_read_with_the_options_of_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask, prompts), seen = zoo.model("llama"), batch(), []

    def noted(model: Any, reader: KVCache, *rest: Any) -> torch.Tensor:
        seen.append((reader.options, reader.progress.max_length, reader.progress.prefill.prompts, rest[2:]))
        return prefill(model, reader, *rest)

    monkeypatch.setattr(shared_prefill, "prefill", noted)
    made = caches(model, prompts)
    made[0].options = replace(made[0].options, mlp_chunk=16)
    read_prompts(model, made, prompts, ids, mask, chunk=20, rows=2)
    assert seen == [(made[0].options, 60, prompts, (20, 2))]


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        ({"quantized_prefill": True}, "attends to quantized"),
        ({"keys_before_rope": True}, "keys before RoPE"),
        ({"speculation": "any"}, "speculatively"),
        ({}, None),
    ],
    ids=str,
)
def test_methods_whose_prefill_is_their_own_are_refused(traits: dict[str, Any], said: str | None) -> None:
    plain = {"quantized_prefill": False, "keys_before_rope": False, "speculation": None}
    reason = sharing_refusal(SimpleNamespace(**{**plain, **traits}))  # type: ignore[arg-type]
    assert reason is None if said is None else said in (reason or "")


def test_a_prompt_is_not_read_for_a_method_that_cannot_share_it() -> None:
    model, (ids, mask, prompts) = zoo.model("llama"), batch()
    atom = load_method("atom", prefill="quantized")
    made = [load_method("fp16").new_cache(model, prompts), atom.new_cache(model, prompts)]
    with pytest.raises(CacheError, match="Atom cannot share a prefill: its prompt attends to quantized"):
        read_prompts(model, made, prompts, ids, mask)
