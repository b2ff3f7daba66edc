"""Claims of methods about rollback: ``by_token``, ``gives_tail`` and ``eager`` are true; wrong claims are caught."""

from itertools import pairwise

import pytest
import torch

from kvbench.methods import load_method
from tests import zoo
from tests.contract.test_methods import CASES, TOYS, fresh, make

ONE = slice(0, 1)
#: tokens of the prompt, and of the answer one by one
PROMPT, STEPS = 150, 20
#: method, quantizer
CLAIMS = [case.values for case in CASES if not any(mark.name == "skipif" and mark.args[0] for mark in case.marks)]


def filled(method, tokens: int, prompt: int):
    """A layer that has seen `tokens` tokens, `prompt` of them at once."""
    ids, _ = zoo.padded_batch([prompt])
    model = zoo.model("llama")
    cache = fresh(method, model, ids, torch.ones_like(ids))
    method.detach(model)
    layer = cache.layers[-1]
    keys, values = zoo.random_kv(PROMPT + STEPS, heads=2, channels=64, seed=8)
    for first, last in pairwise([0, *range(prompt, tokens + 1)]):
        zoo.feed(layer, keys[:, :, first:last], values[:, :, first:last])
    layer.settle()
    return layer


def stored(layer, side: int) -> torch.Tensor:
    store = layer.stores()[side]
    cuts = store.cuts(ONE, 0, store.length(ONE))
    return torch.cat([store.read(ONE, first, last, torch.float32) for first, last in pairwise(cuts)], 2)


def gives_back_tokens(method) -> bool:
    """Tokens of the answer and of the prompt leave a shorter prompt's state behind, keys and values."""
    layer, shorter = filled(method, PROMPT + STEPS, PROMPT), filled(method, PROMPT - 50, PROMPT - 50)
    layer.crop(-STEPS - 50)
    signatures = [[store.signature(0) for store in each.stores()] for each in (layer, shorter)]
    return signatures[0] == signatures[1] and all(
        torch.equal(stored(layer, side), stored(shorter, side)) for side in (0, 1)
    )


def gives_back_tails(method) -> bool:
    """The whole tail of a prompt leaves a shorter prompt's keys behind, and as many values.

    What an eviction has dropped does not come back: of the shorter prompt's tokens the oldest are missing.
    """
    layer = filled(method, PROMPT, PROMPT)
    count = min(store.tail.length(ONE) for store in layer.stores())
    assert count, "nothing is exact: the claim means nothing"
    layer.crop(-count)
    shorter = filled(method, PROMPT - count, PROMPT - count)
    places, expected = layer.positions(0).tolist(), shorter.positions(0).tolist()
    if method.drops_tokens:
        return places == expected[len(expected) - len(places) :]
    return (
        places == expected
        and layer.stores()[0].signature(0) == shorter.stores()[0].signature(0)
        and torch.equal(stored(layer, 0), stored(shorter, 0))
    )


@pytest.mark.parametrize(("name", "quantizer"), CLAIMS)
def test_claims_are_true(name, quantizer):
    method = make(name, quantizer)
    assert method.by_token or not method.eager, "what is stored at once cannot be taken back otherwise"
    if method.by_token:
        assert gives_back_tokens(method)
    if method.gives_tail:
        assert gives_back_tails(method)


def test_somebody_claims_each():
    methods = [make(*claim) for claim in CLAIMS]
    assert all(any(getattr(method, claim) for method in methods) for claim in ("by_token", "gives_tail", "eager"))


def test_wrong_claims_are_caught():
    """Taken back from a window that has packed, tokens leave it shorter than a shorter prompt's."""

    right = load_method(next(str(toy) for toy in TOYS if toy.stem == "recent_four"))

    class Wrong(type(right)):
        by_token = gives_tail = True

    wrong = Wrong(takes=right.takes, quantizer=right.quantizer)
    assert not gives_back_tokens(wrong)
    assert not gives_back_tails(wrong)
