"""Tokens that evicting methods keep: the authors' and the harnesses' choices (golden), states, bytes, refusals."""

import json
import random

import numpy as np
import pytest
import torch

from kvbench.attention import observe, reference
from kvbench.errors import CacheError, ConfigError
from kvbench.methods import load_method
from kvbench.runner.span_likelihood import check_mode
from tests import zoo
from tests.data_support import GOLDEN
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)
INDICES = json.loads((GOLDEN / "eviction_indices.json").read_text())
LENGTH = 96


def attention() -> torch.Tensor:
    """Causal attention of the golden inputs, ``[1, Hq, n, n]`` fp32."""
    with np.load(GOLDEN / "eviction_inputs.npz") as arrays:
        query, keys = torch.from_numpy(arrays["q"]), torch.from_numpy(arrays["k"])
    return observe.probabilities(query, keys, None, query.shape[-1] ** -0.5, 0)


def name(case: dict) -> str:
    return "-".join(str(case[k]) for k in ("method", "window", "capacity", "pooling"))


FACTORY = INDICES["kvcache_factory"]["cases"]
#: key of the golden -> KV heads that choose, and how their query heads are reduced
GROUPS = {
    "kept_per_query_head_sorted": (4, "mean"),
    **{f"kept_per_kv_head_{how}_sorted": (2, how) for how in ("mean", "max", "sum")},
}


@pytest.mark.parametrize("case", [c for c in FACTORY if c["method"] == "snapkv"], ids=name)
@pytest.mark.parametrize("key", GROUPS)
def test_snapkv_keeps_what_the_authors_code_keeps(case, key):
    """Per query head as the authors, per KV head as KVCache-Factory; with max pooling up to equal votes."""
    heads, group = GROUPS[key]
    window, held = case["window"], case["capacity"]
    method = load_method(
        "snapkv", budget=held, window=window, kernel=case["kernel"], pooling=case["pooling"][:3], group=group
    )
    seen = attention()[:, :, -window:]
    keys = torch.zeros(1, heads, LENGTH, 8)
    kept = method.choose(keys, keys, seen)[0].tolist()
    if case["pooling"] == "avgpool":
        assert kept == case[key]
        return
    votes = method.score(keys, keys, seen)
    # the votes are theirs: torch's own choice among equal ones, which is that of the golden's run, gives their indices
    topk = votes.topk(held - window, -1).indices[0].sort(-1).values
    assert [row + list(range(LENGTH - window, LENGTH)) for row in topk.tolist()] == case[key]
    for head, (ours, theirs) in enumerate(zip(kept, case[key], strict=True)):
        border = votes[0, head].topk(held - window).values[-1]
        differing = set(ours) ^ set(theirs)
        assert len(ours) == len(theirs) and all(votes[0, head, place] == border for place in differing)


@pytest.mark.parametrize("case", [c for c in FACTORY if c["method"] == "h2o"], ids=name)
@pytest.mark.parametrize("key", GROUPS)
def test_one_shot_h2o_keeps_what_the_harness_keeps(case, key):
    heads, group = GROUPS[key]
    method = load_method("h2o", budget=case["capacity"], recent=case["window"], evict="prefill", group=group)
    keys = torch.zeros(1, heads, LENGTH, 8)
    assert method.choose(keys, keys, attention().sum(2, keepdim=True))[0].tolist() == case[key]


def test_streamingllm_keeps_what_the_harnesses_keep():
    case = next(c for c in FACTORY if c["method"] == "streamingllm")
    sinks, held = case["capacity"] - case["window"], case["capacity"]
    golden = [(sinks, held, case["kept_per_query_head_sorted"])]
    for other in INDICES["kvpress"]["cases"]:
        if other["press"] == "streamingllm_sink4":
            golden.append((4, 1 - other["compression_ratio"], other["kept_per_kv_head_sorted"]))
    assert len(golden) == 4
    for sinks, budget, kept in golden:
        method = load_method("streamingllm", sinks=sinks, budget=budget, position="original", evict="prefill")
        layer = new_layer(method)
        feed(layer, *marked(LENGTH))
        for theirs in kept:
            assert layer.positions(0).tolist() == theirs == marks(layer)[0]


@pytest.mark.parametrize(
    "case", [c for c in INDICES["kvpress"]["cases"] if c["press"] == "snapkv_w8_k5"], ids=lambda c: str(c["n_kept"])
)
def test_snapkv_keeps_what_kvpress_keeps(case):
    method = load_method(
        "snapkv", budget=1 - case["compression_ratio"], window=8, kernel=5, pooling="avg", group_after_pooling=True
    )
    keys = torch.zeros(1, 2, LENGTH, 8)
    assert method.choose(keys, keys, attention()[:, :, -8:])[0].tolist() == case["kept_per_kv_head_sorted"]


# -- states ----------------------------------------------------------------------------------------------------------


def marked(tokens: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which channel 0 is the position."""
    keys, values = random_kv(tokens, heads=heads, channels=8)
    keys[..., 0] = values[..., 0] = torch.arange(tokens)
    return keys, values


def marks(layer) -> list[list[int]]:
    """Positions that are really held in the keys, by head; the values hold the same."""
    keys, values = (store.tail.view(ALL)[0, :, :, 0] for store in layer.stores())
    assert torch.equal(keys, values)
    return keys.int().tolist()


@pytest.mark.parametrize(("sinks", "budget"), [(4, 32), (0, 20), (1, 2), (4, 0.25)])
def test_streamingllm_holds_sinks_and_the_newest_for_every_n_and_split(sinks, budget):
    method = load_method("streamingllm", sinks=sinks, budget=budget, position="original")
    keys, values = marked(400)
    rng = random.Random(sinks)
    for prompt in (1, 3, 5, 31, 33, 150, 399):
        layer, n = new_layer(method), prompt
        feed(layer, keys[:, :, :n], values[:, :, :n])
        while n < 400:
            step = min(rng.choice((1, 1, 1, 2, 7)), 400 - n)
            feed(layer, keys[:, :, n : n + step], values[:, :, n : n + step])
            n += step
            layer.settle()
            stored = min(n, max(budget if isinstance(budget, int) else int(budget * n), sinks + 1))
            first = min(sinks, stored)
            expected = [*range(first), *range(n - stored + first, n)]
            # a share grows with n, but a dropped token does not come back
            assert set(marks(layer)[0]) <= set(range(n)) and len(marks(layer)[0]) == min(stored, len(expected))
            if isinstance(budget, int):
                assert marks(layer)[0] == layer.positions(0).tolist() == expected
            used = sum(store.tail.used(0)["window"] for store in layer.stores())
            assert used == 2 * 2 * stored * 8 * 4  # 2 H kept D P


def slow_h2o(keys, values, queries, prompt, steps, heavy, recent, *, per_query=False, scaling=0.2):
    """H2O by the book for one KV head whose query heads are averaged: positions held and outputs, step by step."""
    n = prompt
    scores = torch.zeros(n)
    everything = torch.softmax(
        (queries[:, :n] @ keys[:n].T * scaling).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf), -1
    )
    scores = everything.mean(0).sum(0)
    held, states, outputs = list(range(n)), [], []

    def evict():
        nonlocal held, scores
        if len(held) > heavy(n) + recent(n):
            border = len(held) - recent(n)
            worth = scores / torch.tensor([n - p for p in held]) if per_query else scores
            best = sorted(range(border), key=lambda i: -worth[i])[: heavy(n)]
            chosen = sorted(best) + list(range(border, len(held)))
            held, scores = [held[i] for i in chosen], scores[chosen]

    evict()
    states.append(list(held))
    for count in steps:
        held += range(n, n + count)
        scores = torch.cat([scores, torch.zeros(count)])
        logits = queries[:, n : n + count] @ keys[held].T * scaling
        logits[..., -count:] += torch.full((count, count), -torch.inf).triu(1)
        probabilities = torch.softmax(logits, -1)
        outputs.append(probabilities @ values[held])
        scores = scores + probabilities.mean(0).sum(0)
        n += count
        evict()
        states.append(list(held))
    return states, outputs


@pytest.mark.parametrize(
    ("budget", "recent", "per_query"), [(40, 10, False), (40, 10, True), (0.25, 0.5, False), (9, 0, False)]
)
def test_h2o_accumulates_and_drops_at_every_step(budget, recent, per_query):
    method = load_method("h2o", budget=budget, recent=recent, per_query=per_query)
    keys, values = marked(220)
    keys[..., 0] /= 100  # not the only thing that decides
    queries = torch.randn(1, 4, 220, 8, generator=torch.Generator().manual_seed(1))
    steps = [1, 1, 3, 1, 5, 1, 1, 2, 1, 1, 1, 1, 9, 1, 1]
    layer, prompt = new_layer(method), 120
    key, value = layer.update(keys[:, :, :prompt], values[:, :, :prompt])[0].claim()
    layer.observed = observe.extend(layer, queries[:, :, :prompt], key, None, 0.2)
    layer.end_chunk(key, value)
    slow = [
        slow_h2o(
            keys[0, h],
            values[0, h],
            queries[0, 2 * h : 2 * h + 2],
            prompt,
            steps,
            lambda n: method.split(n)[0],
            lambda n: method.split(n)[1],
            per_query=per_query,
        )
        for h in range(2)
    ]
    n = prompt
    for number, count in enumerate([0, *steps]):
        if count:
            layer.append(*layer.update(keys[:, :, n : n + count], values[:, :, n : n + count])[0].claim())
            out = reference.attend_reference(None, layer, queries[:, :, n : n + count], None, 0.2)
            for h in range(2):
                expected = slow[h][1][number - 1].transpose(0, 1)
                torch.testing.assert_close(out[0, :, 2 * h : 2 * h + 2], expected, rtol=1e-4, atol=1e-4)
            n += count
            layer.settle()
        places = layer.positions(0)
        assert places.sort(-1).values.tolist() == [slow[h][0][number] for h in range(2)]
        for store, x in zip(layer.stores(), (keys, values), strict=True):  # positions are those of the tokens
            assert torch.equal(store.tail.view(ALL)[0], x[0].gather(1, places[..., None].expand(-1, -1, 8)))
        stored = sum(method.split(n))
        used = [store.tail.used(0) for store in layer.stores()]
        assert used == [{"window": 2 * stored * 8 * 4, "index": 2 * stored * (4 + 4)}, {"window": 2 * stored * 8 * 4}]


def test_h2o_forgets_what_rejected_queries_attended_to():
    """Drafts over several held steps, taken back: scores are as if they had not been."""
    method = load_method("h2o", budget=40, recent=10)
    keys, values = marked(120)
    queries = torch.randn(1, 4, 120, 8, generator=torch.Generator().manual_seed(2))

    def run(drafts: bool) -> torch.Tensor:
        layer = new_layer(method)
        key, value = layer.update(keys[:, :, :80], values[:, :, :80])[0].claim()
        layer.observed = observe.extend(layer, queries[:, :, :80], key, None, 0.2)
        layer.end_chunk(key, value)

        def step(n: int, count: int) -> None:
            layer.append(*layer.update(keys[:, :, n : n + count], values[:, :, n : n + count])[0].claim())
            reference.attend_reference(None, layer, queries[:, :, n : n + count], None, 0.2)

        for n in range(80, 100):
            if drafts:
                layer.settle()
                layer.progress.frozen = True
                step(90, 1)
                step(91, 3)
                layer.crop(-2)  # part of a step
                step(99, 1)
                layer.crop(-3)
                layer.progress.frozen = False
            step(n, 1)
        layer.settle()
        return layer.stores()[0].tail.scores.view(ALL)

    torch.testing.assert_close(run(True), run(False))


PADDED = [("snapkv", {"budget": 24, "window": 8}), ("h2o", {"budget": 24, "recent": 8})]


@pytest.mark.parametrize(("method", "settings"), PADDED)
def test_a_padded_row_holds_what_it_holds_alone(method, settings):
    """Attention that was observed belongs to a row's own tokens, however many columns of padding stand before them."""
    method, starts = load_method(method, **settings), [0, 30]
    keys, values = random_kv(90, batch=2, channels=8)
    queries = torch.randn(2, 4, 90, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 1, 90, 90).tril().bool()
    mask[1, ..., :30] = False  # queries of the padding see nothing

    def held(rows: slice, first: int, mask: torch.Tensor | None) -> list:
        layer = new_layer(method, starts if mask is not None else None)
        key, value = layer.update(keys[rows, :, first:], values[rows, :, first:])[0].claim()
        layer.observed = observe.extend(layer, queries[rows, :, first:], key, mask, 0.5)
        layer.end_chunk(key, value)
        return [(layer.positions(row) + first).tolist() for row in range(layer.batch)]

    together = held(ALL, 0, mask)
    assert together == [*held(slice(0, 1), 0, None), *held(slice(1, 2), 30, None)]
    assert all(len(set(head)) == 24 for row in together for head in row)


def test_what_a_clone_evicts_stays_in_the_original():
    method = load_method("h2o", budget=24, recent=8)
    keys, values = random_kv(80, channels=8)
    queries = torch.randn(1, 4, 80, 8, generator=torch.Generator().manual_seed(4))
    layer = new_layer(method)
    key, value = layer.update(keys[:, :, :60], values[:, :, :60])[0].claim()
    layer.observed = observe.extend(layer, queries[:, :, :60], key, None, 0.5)
    layer.end_chunk(key, value)
    before, tail = layer.positions(0).clone(), layer.stores()[0].tail.view(ALL).clone()
    twin = layer.clone(layer.progress.clone())
    for n in range(60, 80):
        twin.append(*twin.update(keys[:, :, n : n + 1], values[:, :, n : n + 1])[0].claim())
        reference.attend_reference(None, twin, queries[:, :, n : n + 1], None, 0.5)
    twin.settle()
    assert torch.equal(layer.positions(0), before) and torch.equal(layer.stores()[0].tail.view(ALL), tail)
    assert not torch.equal(twin.positions(0), before)
    assert torch.equal(keys[0, 0, twin.positions(0)[0]], twin.stores()[0].tail.view(ALL)[0, 0])


def test_queries_that_see_nothing_attend_to_nothing():
    keys, _ = random_kv(6, channels=8)
    query = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 6, 6).tril().bool()
    mask[..., :2] = False
    seen = observe.probabilities(query, keys, mask, 0.5, 0)
    torch.testing.assert_close(seen.sum(-1), torch.tensor([0.0, 0, 1, 1, 1, 1]).expand(1, 4, 6))


def test_column_sums_are_made_in_blocks(monkeypatch):
    layer = new_layer(load_method("h2o"))
    keys, _ = random_kv(300, channels=16)
    query = torch.randn(1, 4, 300, 16, generator=torch.Generator().manual_seed(0))
    whole = observe.extend(layer, query, keys, None, 0.25)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 4, 1), 300.0))
    made, plain = [], observe.probabilities

    def counted(*arguments):
        made.append(plain(*arguments))
        return made[-1]

    monkeypatch.setattr(observe, "probabilities", counted)
    monkeypatch.setitem(observe.SCORES, "cpu", 4 * 300 * 16)
    torch.testing.assert_close(observe.extend(layer, query, keys, None, 0.25), whole)
    assert max(part.numel() for part in made) <= 4 * 300 * 16


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "overrides", "message"),
    [
        ("streamingllm", {"sinks": -1}, "method.sinks=-1"),
        ("streamingllm", {"budget": 4}, "method.budget=4: is too small for the sinks"),
        ("streamingllm", {"budget": 1.5}, "method.budget=1.5: is not a share"),
        ("streamingllm", {"position": "new"}, "method.position=new"),
        ("streamingllm", {"quantizer": "int2"}, "does not accept this quantizer"),
        ("snapkv", {"kernel": 4}, "method.kernel=4: must be odd"),
        ("snapkv", {"window": 0}, "method.window=0"),
        ("snapkv", {"budget": 32}, "method.budget=32: is too small for the window"),
        ("h2o", {"recent": 1.5}, "method.recent=1.5"),
        ("h2o", {"recent": -1}, "method.recent=-1: must not be negative"),
        ("h2o", {"budget": 1}, "method.budget=1: is too small for the recent"),
        ("snapkv", {"kernel": -1}, "method.kernel=-1"),
        ("h2o", {"budget": 8, "recent": 8}, "method.budget=8: is too small for the recent"),
        ("h2o", {"group": "median"}, "method.group=median"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(method, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_method(method, **overrides)


def test_text_that_comes_token_by_token_would_not_be_evicted():
    for overrides in ({"evict": "prefill"}, {}):
        h2o = load_method("h2o", **overrides)
        if h2o.prompt_only:
            with pytest.raises(ConfigError, match=r"dataset\.prefill"):
                check_mode(h2o, "decode", 0)
        else:
            check_mode(h2o, "decode", 0)
        with pytest.raises(ConfigError, match="drops tokens"):
            check_mode(h2o, "simulated", 0)
    with pytest.raises(ConfigError, match=r"dataset\.prefill"):
        check_mode(load_method("snapkv"), "decode", 0)
    with pytest.raises(CacheError, match="no attention was observed"):
        feed(new_layer(load_method("snapkv", budget=40)), *marked(50))


@pytest.mark.parametrize(
    ("share", "prompt", "kept"), [(0.29, 100, 29), (0.57, 100, 57), (0.58, 50, 29), (0.25, 99, 24)]
)
def test_a_share_of_the_context_is_what_a_person_counts(share, prompt, kept):
    """0.29 * 100 is 28.999999999999996 in binary: 29 tokens, as typed; and 24.75 is 24."""
    model = zoo.model()
    cache = load_method("snapkv", budget=share, window=8).new_cache(model)
    with torch.inference_mode():
        model(torch.arange(prompt)[None] % 90 + 3, past_key_values=cache)
    assert cache.bill().used.window == kept * 2 * 2 * 2 * 64 * 4  # layers, sides, heads, channels, bytes
