"""Forward passes: which prompts share one, what a pass is given, and reference answers of odd lengths."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.decoding import passes
from kvbench.decoding.autoregressive import answer_nll
from kvbench.decoding.passes import prefill, prefill_groups
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo

MASK = torch.ones(5, 100)


def cache_of(takes: bool = True, prompts: bool = True) -> Any:
    known = Prompts([0] * 5, [100] * 5) if prompts else None
    return SimpleNamespace(takes_groups=lambda: takes, progress=SimpleNamespace(prefill=SimpleNamespace(prompts=known)))


@pytest.mark.parametrize(
    ("rows", "width", "mask", "cache", "sizes"),
    [
        (2, 100, MASK, cache_of(), [2, 2, 1]),
        (4, 100, None, cache_of(prompts=False), [4, 1]),  # no padding: nothing to declare
        (5, 100, MASK, cache_of(), [5]),
        (9, 100, MASK, cache_of(), [5]),
        (None, 100, MASK, cache_of(), [5]),
        ("auto", 100, MASK, cache_of(), [5]),
        ("auto", passes.TOGETHER // 2, MASK, cache_of(), [2, 2, 1]),
        ("auto", passes.TOGETHER // 2 + 1, MASK, cache_of(), [1] * 5),
        ("auto", passes.TOGETHER * 3, MASK, cache_of(), [1] * 5),
        (2, 100, MASK, cache_of(takes=False), [5]),
        (2, 100, MASK, cache_of(prompts=False), [5]),
    ],
)
def test_prompts_share_a_pass_up_to_so_many_tokens(rows: Any, width: int, mask: Any, cache: Any, sizes: Any) -> None:
    computed = prefill_groups(cache, 5, width, mask, rows)
    assert [part.stop - part.start for part in computed] == sizes
    assert computed[0].start == 0 and all(a.stop == b.start for a, b in pairwise(computed))


class Seen(torch.nn.Module):
    """A model that notes what it is given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, **given: Any) -> Any:
        self.calls.append(given)
        return self.model(**given)


@torch.no_grad()
def test_a_prompt_in_chunks_has_the_columns_and_positions_of_its_tokens() -> None:
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([5, 9])
    cache = method.new_cache(model)
    seen = Seen(model)
    logits = prefill(seen, cache, ids, mask, 4)  # type: ignore[arg-type]
    assert [call["input_ids"].tolist() for call in seen.calls] == [
        ids[:, first : first + 4].tolist() for first in (0, 4, 8)
    ]
    assert [call["attention_mask"].shape[1] for call in seen.calls] == [4, 8, 9]
    assert torch.cat([call["position_ids"] for call in seen.calls], 1).tolist() == [
        [0, 0, 0, 0, 0, 1, 2, 3, 4],
        [*range(9)],
    ]
    assert all(call["logits_to_keep"] == 1 and call["use_cache"] for call in seen.calls)
    assert logits.shape == (2, zoo.VOCABULARY)
    whole, seen.calls = method.new_cache(model), []
    torch.testing.assert_close(prefill(seen, whole, ids[1:], None, 9), logits[1:], rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    (call,) = seen.calls
    assert call["attention_mask"] is None and call["position_ids"].tolist() == [[*range(9)]]
    method.detach(model)


def test_a_model_that_used_another_cache_is_found_out_by_the_number_of_tokens() -> None:
    cache = SimpleNamespace(get_seq_length=lambda: 7)
    passes.check_cache(cache, 7)  # type: ignore[arg-type]
    for expected in (6, 8):
        with pytest.raises(CacheError, match=f"contains 7 tokens, but {expected} went through the model"):
            passes.check_cache(cache, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", ["padded", "alone"])
@torch.no_grad()
def test_answers_of_any_length_are_scored_after_the_prompt(batch: str) -> None:
    """None, one token, several: padding behind shorter ones does not count, and the cache stays as it is."""
    model, method = zoo.model("llama"), load_method("fp16")
    lengths, answers = {"padded": ([20, 30, 26], [[], [5], [6, 7, 8]]), "alone": ([30], [[5, 9]])}[batch]
    ids, mask = zoo.padded_batch(lengths)
    given = mask if batch == "padded" else None
    cache = method.new_cache(model)
    logits = prefill(model, cache, ids, given)
    computed = answer_nll(model, cache, logits, answers, given)
    assert cache.get_seq_length() == 30
    assert [count for _, count in computed] == [len(answer) for answer in answers]
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        text = torch.cat([ids[row, -length:], torch.tensor(answer, dtype=torch.long)])[None]
        logs = torch.log_softmax(model(input_ids=text).logits[0], -1)
        wanted = -sum(float(logs[length - 1 + i, token]) for i, token in enumerate(answer))
        assert computed[row][0] == pytest.approx(wanted, rel=1e-5)
    assert answer_nll(model, cache, logits, [[]] * len(lengths), given) == [(0.0, 0)] * len(lengths)
    single = answer_nll(model, cache, logits, [[5]] * len(lengths), given)
    assert single[-1][0] == pytest.approx(-float(torch.log_softmax(logits[-1].float(), -1)[5]))
    method.detach(model)


@pytest.mark.parametrize("padded", [True, False])
@torch.inference_mode()
def test_groups_of_prompts_give_what_one_pass_gives(padded: bool) -> None:
    """Each group with its own rows of tokens, mask and positions, and all of them in the cache afterwards."""
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int4", residual=32)
    ids, mask = zoo.padded_batch([40, 33, 37] if padded else [40, 40, 40], seed=2)
    given = mask if padded else None
    caches = [method.new_cache(model, Prompts.from_batch(ids, mask)) for _ in range(2)]
    seen = Seen(model)
    whole = prefill(model, caches[0], ids, given, rows=None)
    parts = prefill(seen, caches[1], ids, given, rows=2)  # type: ignore[arg-type]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert [call["input_ids"].tolist() for call in seen.calls] == [ids[:2].tolist(), ids[2:].tolist()]
    assert [call["position_ids"].tolist() for call in seen.calls] == [
        (mask.cumsum(-1) - 1).clamp(min=0)[rows].tolist() for rows in (slice(0, 2), slice(2, 3))
    ]
    assert [None if (m := call["attention_mask"]) is None else m.tolist() for call in seen.calls] == (
        [mask[:2].tolist(), mask[2:].tolist()] if padded else [None, None]
    )
    assert caches[1].get_seq_length() == 40 and caches[1].bill().used == caches[0].bill().used
    for mine, its in zip(caches[1].layers, caches[0].layers, strict=True):
        assert mine.sealed and [s.lengths for s in mine.segments()] == [s.lengths for s in its.segments()]
    method.detach(model)


@pytest.mark.parametrize("all_logits", [True, False])
@torch.inference_mode()
def test_a_model_that_takes_tokens_one_by_one_gets_each_with_its_own_columns(
    all_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = zoo.model("llama"), load_method("fp16")
    ids, mask = zoo.padded_batch([20, 14], seed=2)
    caches = [method.new_cache(model) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, ids[:, :15], mask[:, :15])
    monkeypatch.setattr(KVCache, "one_by_one", property(lambda cache: cache is caches[1]))
    positions = (mask.cumsum(-1) - 1)[:, 15:]
    together = passes.forward(model, caches[0], ids[:, 15:], mask, positions, all_logits=all_logits)
    seen = Seen(model)
    single = passes.forward(seen, caches[1], ids[:, 15:], mask, positions, all_logits=all_logits)  # type: ignore[arg-type]
    assert single.shape == (2, 5 if all_logits else 1, zoo.VOCABULARY)
    torch.testing.assert_close(single, together, rtol=1e-4, atol=1e-5)
    assert [call["attention_mask"].shape[1] for call in seen.calls] == [16, 17, 18, 19, 20]
    assert [call["position_ids"].tolist() for call in seen.calls] == positions.T[..., None].tolist()
    method.detach(model)
