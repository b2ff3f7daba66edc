"""Claims of methods about rollback: ``by_token``, ``gives_tail`` and ``eager`` are true; wrong claims are caught.

Prompts are longer than what any method keeps exact, so that every method that packs has packed.
"""

from itertools import pairwise

import pytest
import torch

from kvbench.errors import CacheError
from kvbench.methods import RecencyMethod, load_method
from tests import zoo
from tests.contract.test_methods import CASES, TOYS, fields, fresh, make

ONE = slice(0, 1)
#: tokens of the prompt, and of the answer one by one
PROMPT, STEPS = 600, 20
#: method, quantizer
CLAIMS = [case.values for case in CASES if not any(mark.name == "skipif" and mark.args[0] for mark in case.marks)]


def claims() -> list:
    """Each method, and where it has a window of newest tokens, also with one, or without it where that is its preset.

    What a quantizer's bits change is no matter here: the first one of each method is enough.
    """
    found = {}
    for name, quantizer in CLAIMS:
        window = getattr(make(name, quantizer), "window", None)
        found.setdefault((name, "preset"), (name, quantizer, {}))
        if isinstance(window, int) and not {"evict", "prefill"} & set(fields(name)):  # which exclude a window
            found.setdefault((name, "window"), (name, quantizer, {"window": 0 if window > 64 else 64}))
    return [pytest.param(*case, id="-".join((case[0].split("/")[-1], key[1]))) for key, case in found.items()]


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


def gives_back_tails(method, layer) -> bool:
    """The whole tail of a prompt leaves a shorter prompt's keys behind, and its values but for some packed early.

    These are the newest of the values that are packed, at most as many as the tokens taken back.
    """
    count = min(*(store.tail.length(ONE) for store in layer.stores()), PROMPT - 50)
    before = stored(layer, 1)
    layer.take_back([count])
    shorter = filled(method, PROMPT - count, PROMPT - count)
    keys, fewer = layer.stores()[0].signature(0), shorter.stores()[0].signature(0)
    if keys != fewer or layer.positions(0).tolist() != shorter.positions(0).tolist():
        return False
    left = sum(keys)
    packed, wanted = (left - each.stores()[1].tail.length(ONE) for each in (layer, shorter))
    values, others = stored(layer, 1), stored(shorter, 1)
    return (
        torch.equal(stored(layer, 0), stored(shorter, 0))
        and wanted <= packed <= wanted + count
        and torch.equal(values, before[:, :, :left])
        and torch.equal(values[:, :, :wanted], others[:, :, :wanted])
        and torch.equal(values[:, :, packed:], others[:, :, packed:])
    )


@pytest.mark.parametrize(("name", "quantizer", "more"), claims())
def test_claims_are_true(name, quantizer, more, monkeypatch):
    """Where tokens of a prompt were packed or dropped, its tail is given back without a trace, or not at all."""
    method = load_method(name.split(":")[0], quantizer=quantizer, **{**fields(name), **more})
    assert method.by_token or not method.eager, "what is stored at once cannot be taken back otherwise"
    if method.by_token:
        assert gives_back_tokens(method)
        return
    if method.observe_prompt or method.observe_steps:  # no attention is fed here
        assert not method.gives_tail
        return
    layer = filled(method, PROMPT, PROMPT)
    tails = min(store.tail.length(ONE) for store in layer.stores())
    assert layer.firm[0] or not method.settles, "the prompt is too short to show anything"
    if method.gives_tail:
        assert tails and gives_back_tails(method, layer)
    elif layer.firm[0]:
        with pytest.raises(CacheError, match="only the newest 0 can be removed"):
            layer.take_back([1])
        if tails and isinstance(method, RecencyMethod):
            monkeypatch.setattr(type(method), "gives_tail", True)
            assert not gives_back_tails(method, layer), "the claim could be made"


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
    assert not gives_back_tails(wrong, filled(wrong, PROMPT, PROMPT))
