"""Methods given by a score per token: scores that no choice can be made from, and attention that was not observed."""

from dataclasses import dataclass

import pytest
import torch

from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods import ScoredMethod
from tests.zoo import feed, new_layer, random_kv

KEYS, VALUES = random_kv(40, batch=2, heads=3, channels=8)


@dataclass(kw_only=True)
class Own(ScoredMethod):
    """Scores that `rule` returns."""

    newest: int = 4
    rule: object = None

    def score(self, keys, values, attention):
        return self.rule(keys, attention)


def refusal(rule, error=CacheError, keys=KEYS) -> str:
    with pytest.raises(error) as caught:
        feed(new_layer(Own(rule=rule)), keys, VALUES)
    return str(caught.value)


@pytest.mark.parametrize("left_out", [0, 3, 4])
def test_the_newest_tokens_may_be_left_out(left_out):
    ascending = torch.arange(40.0).expand(2, 3, 40)
    layer = new_layer(Own(rule=lambda keys, attention: ascending[..., : 40 - left_out]))
    feed(layer, KEYS, VALUES)
    assert layer.positions(0).tolist() == [list(range(20, 40))] * 3


@pytest.mark.parametrize(
    ("rule", "returned"),
    [
        (lambda keys, attention: keys, "shape [2, 3, 40, 8]"),
        (lambda keys, attention: keys.norm(dim=-1).mean(1), "shape [2, 40]"),
        (lambda keys, attention: keys.norm(dim=-1).repeat(1, 2, 1), "shape [2, 6, 40]"),
        (lambda keys, attention: keys.norm(dim=-1)[:1], "shape [1, 3, 40]"),
        (lambda keys, attention: keys.norm(dim=-1)[..., :35], "shape [2, 3, 35]"),
        (lambda keys, attention: keys.norm(dim=-1).repeat(1, 1, 2), "shape [2, 3, 80]"),
        (lambda keys, attention: None, "a NoneType"),
        (lambda keys, attention: keys.norm(dim=-1).numpy(), "a ndarray"),
    ],
)
def test_a_score_of_another_shape_is_refused(rule, returned):
    message = refusal(rule)
    assert f"layer 0: Own.score returned {returned}, expected [B, H, n] = [2, 3, 40 (or at least 36, " in message


def test_a_score_that_is_nan_is_refused():
    def rule(keys, attention):
        scores = keys.norm(dim=-1)
        scores[1, 2, 5] = float("nan")
        return scores

    message = refusal(rule, NonFiniteError)
    assert "layer 0: Own.score returned NaN for 1 of 216 scores, the first in row 1, KV head 2, token 5." in message


def test_scores_may_be_infinite():
    scores = torch.full((2, 3, 40), float("-inf"))
    scores[..., 7] = float("inf")
    method = Own(rule=lambda keys, attention: scores, budget=5)
    assert method.choose(KEYS, VALUES, None)[1, 1].tolist() == [7, 36, 37, 38, 39]


def test_nan_in_the_keys_is_reported_as_such():
    keys = KEYS.clone()
    keys[0, 1, 3, 2] = float("nan")
    message = refusal(lambda keys, attention: keys.norm(dim=-1), NonFiniteError, keys)
    assert "layer 0: NaN or Inf in the key at position 3 (row 0, KV head 1, channel 2)" in message


def checked(keys, attention):
    if attention is None:
        raise AssertionError
    return attention


@pytest.mark.parametrize(
    "rule",
    [
        lambda keys, attention: attention.sum(2),
        lambda keys, attention: attention[:, :, 0],
        lambda keys, attention: torch.mean(attention, 2),
        checked,
    ],
)
def test_attention_that_was_not_observed_is_explained(rule):
    message = refusal(rule)
    assert "layer 0: Own.score failed, perhaps because its attention is None (" in message
    assert "set observe_prompt in Own (it is 0)" in message


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (checked, "AssertionError: assertion failed"),
        (lambda keys, attention: attention.sum(2), "AttributeError: 'NoneType' object has no attribute 'sum'"),
    ],
)
def test_the_reason_of_a_failed_score_is_given_or_named(rule, reason):
    assert f"({reason})." in refusal(rule)


def test_another_error_of_score_stays_as_it_is():
    def rule(keys, attention):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        feed(new_layer(Own(rule=rule)), KEYS, VALUES)


def test_a_budget_for_the_whole_prompt_asks_for_no_score():
    """Nothing is chosen, so slots stay in the order of positions."""
    assert Own(rule=None, budget=40).choose(KEYS, VALUES, None) is None
    layer = new_layer(Own(rule=None, budget=99))
    feed(layer, KEYS, VALUES)
    assert layer.order == [None, None] and layer.positions(1).tolist() == list(range(40))
