"""Speculation against the target alone, for every draft, in batches, to the last token."""

import copy

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.decoding import Sampling, generate
from kvbench.decoding.drafting import draw_tokens
from kvbench.decoding.questions import ask
from kvbench.decoding.round_times import Round, row_totals, token_seconds
from kvbench.decoding.speculative import replay
from kvbench.errors import CacheError
from kvbench.methods import load_method
from kvbench.methods.speculation import Speculation
from kvbench.models import int4
from tests import zoo
from tests.marks import fast
from tests.methods.test_quantspec import small

#: drafts with caches of their own, and weights; the prompts are too short for the sparse ones' windows of the paper
DRAFTS = {
    "upper": {},
    "kivi": {"draft": "kivi", "draft_options": {"residual": 32}},
    "logquant": {"draft": "logquant", "draft_options": {"window": 16}},
    "streamingllm": {"draft": "streamingllm", "draft_options": {"budget": 0.9}},
    "h2o": {"draft": "h2o"},
    "cocktail": {"draft": "cocktail", "draft_options": {"encoder": "bm25", "chunk_size": 16}},
    "fp16 target": {"draft": "snapkv", "draft_options": {"window": 8, "budget": 0.5}, "target": "fp16"},
    "int4 weights": {"draft": "full", "draft_weights": "int4"},
}
SAMPLED = Sampling(0.8, 0.95, [5, 6, 7])
CASES = [*((name, None) for name in DRAFTS if name != "logquant"), ("upper", SAMPLED), ("logquant", SAMPLED)]
LENGTHS = [131, 96, 120]


@pytest.fixture(scope="module")
def model():
    model = zoo.restless()
    yield model
    int4.detach(model)


def fresh(method, model, ids, mask=None):
    return method.new_cache(model, Prompts.from_batch(ids, mask, decode=lambda ids: " ".join(map(str, ids))))


def settle_points(rounds, row: int = 0) -> set[int]:
    return {each.settled[row] for each in rounds}


@pytest.mark.parametrize("gamma", fast(range(1, 9), [1, 3, 8]))
def test_greedy_speculation_equals_the_target_alone_flushed_at_the_same_points(model, gamma):
    method = small(32, gamma=gamma)
    ids, _ = zoo.padded_batch([95 + 7 * gamma], seed=gamma)
    cache = method.new_cache(model)
    generation = generate(model, cache, ids, max_new_tokens=48)
    rate = row_totals(generation.rounds, 0)
    assert 0 < rate["accepted"] < rate["drafted"]  # both are exercised
    alone, gaps = replay(model, method.new_cache(model), ids, settle_points(generation.rounds), 48)
    assert min(gaps) > 1e-4  # no ties that rounding could turn
    assert generation.tokens[0] == alone
    assert cache.layers[0].stores()[0].packed.length(slice(0, 1)) > method.border(ids.shape[1])  # flushed on the way


FAST = [("kivi", None), ("streamingllm", None), ("fp16 target", None), ("int4 weights", None), ("upper", SAMPLED)]


@pytest.mark.parametrize(
    ("name", "sampling"), fast(CASES, FAST), ids=[f"{n}-{'sampled' if s else 'greedy'}" for n, s in CASES]
)
def test_rows_of_a_batch_accept_by_themselves_and_equal_the_rows_alone(model, name, sampling):
    method = small(32, gamma=3, **DRAFTS[name])
    ids, mask = zoo.padded_batch(LENGTHS)
    cache = fresh(method, model, ids, mask)
    together = generate(model, cache, ids, mask, max_new_tokens=17, sampling=sampling)
    counts = [row_totals(together.rounds, row) for row in range(3)]
    assert len({tuple(c.values()) for c in counts}) > 1  # they did advance differently
    assert all(c["tokens"] == 16 for c in counts)
    for row, length in enumerate(LENGTHS):
        own = fresh(method, model, ids[row : row + 1, -length:])
        seed = sampling and Sampling(sampling.temperature, sampling.top_p, sampling.seed[row : row + 1])
        alone = generate(model, own, ids[row : row + 1, -length:], max_new_tokens=17, sampling=seed)
        assert alone.tokens[0] == together.tokens[row]
        assert row_totals(alone.rounds, 0) == counts[row]
        assert own.bill().used == cache.bill(row).used


@pytest.mark.slow  # 2 s
def test_rows_that_come_to_hold_equally_many_tokens_are_not_taken_for_one_another(model):
    """Their windows have moved at different rounds, so they lie at different places of their buffers."""
    method = small(32, gamma=3, target="fp16", draft="streamingllm", draft_options={"budget": 32})
    lengths, seeds = [40, 33], [7, 8]
    ids, mask = zoo.padded_batch(lengths, seed=3)
    options = {"max_new_tokens": 70}
    both = generate(model, method.new_cache(model), ids, mask, sampling=Sampling(1.0, 0.9, seeds), **options)
    settled = [each.settled for each in both.rounds]
    assert any(a == b for a, b in settled) and settled[0][0] != settled[0][1]
    for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        alone = ids[row : row + 1, max(lengths) - length :]
        generation = generate(model, method.new_cache(model), alone, sampling=Sampling(1.0, 0.9, [seed]), **options)
        assert generation.tokens[0] == both.tokens[row]


def test_a_draft_that_is_the_target_is_always_accepted(model):
    method = small(32, gamma=4, draft="fp16", target="fp16")
    ids, mask = zoo.padded_batch(LENGTHS)
    generation = generate(model, fresh(method, model, ids, mask), ids, mask, max_new_tokens=25)
    for row in range(3):
        assert row_totals(generation.rounds, row) == {"rounds": 5, "drafted": 19, "accepted": 19, "tokens": 24}


def test_an_end_of_sequence_among_the_drafts_ends_the_row_there(model):
    method = small(32, gamma=6, draft="fp16", target="fp16")  # whole rounds of accepted drafts
    ids, mask = zoo.padded_batch(LENGTHS)

    def run(ends):
        return generate(model, fresh(method, model, ids, mask), ids, mask, max_new_tokens=20, eos_token_ids=ends)

    free = run(())
    place = next(i for i in range(2, 6) if free.tokens[1][i] not in free.tokens[1][:i])  # a draft of the first round
    end = free.tokens[1][place]
    ended = run((end,))
    for row in range(3):
        whole = free.tokens[row]
        cut = whole.index(end) if end in whole else None
        assert ended.tokens[row] == whole[:cut]
        assert ended.finish[row] == ("length" if cut is None else "eos")
    assert row_totals(ended.rounds, 1) == {"rounds": 1, "drafted": place, "accepted": place, "tokens": place}


@pytest.mark.parametrize("wanted", fast([1, 2, 3, 7], [1, 7]))
def test_no_row_drafts_past_its_budget(model, wanted):
    method = small(32, gamma=8)
    ids, mask = zoo.padded_batch(LENGTHS)
    cache = fresh(method, model, ids, mask)
    generation = generate(model, cache, ids, mask, max_new_tokens=wanted)
    longer = generate(model, fresh(method, model, ids, mask), ids, mask, max_new_tokens=20)
    assert generation.tokens == [tokens[:wanted] for tokens in longer.tokens]
    for row, length in enumerate(LENGTHS):
        assert cache.layers[0].real_tokens(row) == length + wanted - 1
        assert all(each.drafted[row] < wanted for each in generation.rounds)


def test_speculation_can_be_left_out_and_needs_the_drafts_cache(model):
    method = small(32, draft="kivi")
    ids, _ = zoo.padded_batch([100])
    cache = method.new_cache(model)
    plain = generate(model, cache, ids, max_new_tokens=8, speculate=False)
    assert plain.rounds == [] and len(plain.step_s) == 7
    assert cache.follower is None  # not filled, not on the bill
    cache = method.new_cache(model)
    cache.lead(None)
    with pytest.raises(CacheError, match=r"cache\.lead"):
        generate(model, cache, ids, max_new_tokens=8)


def test_any_method_may_be_the_target_and_lead_any_other(model):
    """KIVI at 4 bits verifies what LogQuant at 2 drafts; KIVI's values leave their window one by one."""
    target, draft = load_method("kivi", quantizer="int4", residual=32), load_method("logquant", window=16)
    ids, mask = zoo.padded_batch(LENGTHS)
    cache = target.new_cache(model)
    cache.lead(draft.new_cache(model))
    how = Speculation(gamma=3, draft="logquant")
    generation = generate(model, cache, ids, mask, max_new_tokens=17, speculate=how)
    assert len({row_totals(generation.rounds, row)["rounds"] for row in range(3)}) > 1
    for row, length in enumerate(LENGTHS):
        part = ids[row : row + 1, -length:]
        own = target.new_cache(model)
        own.lead(draft.new_cache(model))
        alone = generate(model, own, part, max_new_tokens=17, speculate=how)
        assert alone.tokens[0] == generation.tokens[row]
        assert alone.tokens[0] == replay(model, target.new_cache(model), part, settle_points(alone.rounds), 17)[0]
    with pytest.raises(CacheError, match="should differ by"):
        draft.new_cache(model).follow(cache, [1, 1, 1])


def test_several_questions_on_one_cache_are_drafted_too(model):
    shared, _ = zoo.padded_batch([100])
    questions, answers = [[5, 6, 7], [9]], [[3, 4], [8]]
    for name in ("upper", "kivi"):
        method = small(32, gamma=3, **DRAFTS[name])
        cache = method.new_cache(model)
        computed = ask(model, cache, shared, questions, answers=answers, max_new_tokens=12, sampling=Sampling())
        for question, each in zip(questions, computed, strict=True):
            assert row_totals(each.rounds, 0)["tokens"] == 11
            twin = small(32, gamma=0).new_cache(model)
            plain = ask(model, twin, shared, [question], answers=[[3]], max_new_tokens=12, sampling=Sampling())
            assert plain[0].tokens == each.tokens


def test_four_bit_weights_draft_and_the_exact_ones_verify(model):
    ids, _ = zoo.padded_batch([100])
    plain = generate(model, small(32, gamma=0).new_cache(model), ids, max_new_tokens=16)
    generation = generate(model, small(32, draft_weights="int4_all").new_cache(model), ids, max_new_tokens=16)
    exact = generate(model, small(32).new_cache(model), ids, max_new_tokens=16)
    assert generation.tokens == exact.tokens == plain.tokens
    assert row_totals(generation.rounds, 0)["accepted"] < row_totals(exact.rounds, 0)["accepted"]


def test_the_distribution_of_sampled_tokens_end_to_end(model):
    """Smoke test of the loop around the acceptance: the second token of 300 rows, marginal over the first."""
    rows, method, sampling = 300, small(8, gamma=2), Sampling(1.0, 1.0)
    ids, _ = zoo.padded_batch([30], seed=4)
    many = ids.expand(rows, -1)
    generation = generate(model, method.new_cache(model), many, max_new_tokens=3, sampling=sampling)
    assert row_totals(generation.rounds, 0)["drafted"] > 0
    with torch.no_grad():
        first = torch.softmax(model(ids).logits[0, -1], -1)
        cache = method.new_cache(model)
        every = torch.arange(zoo.VOCABULARY)
        model(input_ids=ids.expand(len(every), -1), past_key_values=cache, use_cache=True)
        second = torch.softmax(model(input_ids=every[:, None], past_key_values=cache, use_cache=True).logits[:, -1], -1)
    expected = rows * (first[:, None] * second).sum(0)
    counts = torch.bincount(torch.tensor([tokens[1] for tokens in generation.tokens]), minlength=zoo.VOCABULARY)
    order = expected.argsort(descending=True)
    bins = order.tensor_split(12)
    observed, wanted = (torch.stack([x[b].sum() for b in bins]) for x in (counts.float(), expected))
    assert float(((observed - wanted) ** 2 / wanted).sum()) < 43.9  # chi-squared of 11 degrees: once in 100,000


def test_rows_that_want_no_draw_do_not_use_their_generator_up():
    probs = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.7, 0.3]])
    generators = [torch.Generator().manual_seed(s) for s in range(3)]
    before = [g.get_state() for g in generators]
    tokens = draw_tokens(probs, generators, [False, True, False])
    assert tokens[0] == 1 and tokens[2] == 0
    assert [torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True)] == [
        True,
        False,
        True,
    ]


def test_figures_and_times_of_a_row():
    rounds = [
        Round(1.0, [10, 10], [4, 4], [4, 1], [5, 2]),
        Round(2.0, [15, 12], [4, 4], [3, 4], [2, 4]),  # row 0 ended after two of its three accepted drafts
        Round(3.0, [17, 16], [0, 2], [0, 0], [0, 1]),
    ]
    assert row_totals(rounds, 0) == {"rounds": 2, "drafted": 6, "accepted": 6, "tokens": 7}
    assert row_totals(rounds, 1) == {"rounds": 3, "drafted": 10, "accepted": 5, "tokens": 7}
    # the end-of-sequence token was the last accepted draft: the fourth, which was refused, is not counted
    ended = [Round(1.0, [10], [4], [3], [3])]
    assert row_totals(ended, 0) == {"rounds": 1, "drafted": 3, "accepted": 3, "tokens": 3}
    assert token_seconds(rounds, 0) == [0.2] * 5 + [1.0] * 2
    assert token_seconds(rounds, 1) == [0.5] * 2 + [1.0] * 5
    assert token_seconds([], 0) == []


@pytest.mark.gpu
def test_on_a_gpu_in_fp16_speculation_follows_the_target_but_for_ties():
    """Verification of several tokens and single steps round differently: where they part, the target was undecided."""
    model = copy.deepcopy(zoo.restless()).half().cuda()
    method = load_method("quantspec", gamma=4)
    for seed in range(4):
        ids = zoo.padded_batch([380 + seed], seed=seed)[0].cuda()
        generation = generate(model, method.new_cache(model), ids, max_new_tokens=48)
        alone, gaps = replay(model, method.new_cache(model), ids, settle_points(generation.rounds), 48)
        parted = next((i for i, (a, b) in enumerate(zip(generation.tokens[0], alone, strict=True)) if a != b), None)
        assert parted is None or gaps[parted] < 0.05
        assert row_totals(generation.rounds, 0)["accepted"] > 0
