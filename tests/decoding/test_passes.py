"""Forward passes: which prompts share one, what a pass is given, and reference answers of odd lengths."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.decoding import passes
from kvbench.decoding.likelihood import answer_nll
from kvbench.decoding.passes import groups, prefill
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
    computed = groups(cache, 5, width, mask, rows)
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
