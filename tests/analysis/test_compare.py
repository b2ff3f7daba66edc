"""Errors of attention against their restatement with whole matrices, for any size of blocks."""

import pytest
import torch

from kvbench.analysis.bins import Bins
from kvbench.analysis.blocks import Exact, Queries
from kvbench.analysis.compare import compare_attention, exact_outputs
from kvbench.analysis.exact import profile
from kvbench.attention.logits import PLAIN, Logits
from tests import zoo
from tests.analysis import full_matrix
from tests.analysis.full_matrix import BINS, METHODS

PROMPT, TOKENS, HEADS, CHANNELS, SCALING = 100, 124, 2, 32, 0.1
PARTS = ("mass", "spikes", "visible")
CAPS = {
    "plain": PLAIN,
    "softcap": Logits(softcap=2.0),
    "sinks": Logits(sinks=torch.tensor([0.5, 2.0, -1.0, 4.0])),
}


def queries_of(count, window=None, logits=PLAIN, group=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(1, group * HEADS, count, CHANNELS, generator=generator)
    return query, Queries.of(query, HEADS, SCALING, TOKENS - count, window, logits)


def compared(name, *, block, window=None, logits=PLAIN, group=2, count=1):
    """Errors and profile of the newest queries, and the same restated."""
    keys, values = zoo.random_kv(TOKENS, 1, HEADS, CHANNELS)
    layer = full_matrix.layer_of(name, keys, values, PROMPT, window)
    query, queries = queries_of(count, window, logits, group)
    exact = Exact(keys[0], values[0])
    shown = profile(queries, exact, BINS, block=block)
    reference = exact_outputs(queries, exact, shown.log_total, BINS, block)
    errors = compare_attention(
        queries, exact, layer, BINS, log_total=shown.log_total, mass=shown.mass, reference=reference, block=block
    )
    whole = full_matrix.restated(
        query[0],
        queries.columns,
        keys[0],
        values[0],
        layer,
        BINS,
        SCALING,
        window=window,
        softcap=logits.softcap,
        sinks=logits.sinks,
    )
    return errors, shown, whole


def close(errors, whole):
    for name in ("mass", "l1", "kl", "lost", "coverage", "full", "output", "parts"):
        ours = getattr(errors, name).double()
        assert torch.allclose(ours, whole[name], atol=1e-5, rtol=1e-5), (name, (ours - whole[name]).abs().max())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("block", [17, 1000])
def test_errors_are_those_of_whole_matrices(name, block):
    errors, _, whole = compared(name, block=block)
    close(errors, whole)


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("name", ["kivi", "logquant", "kivi_evict"])
def test_softcaps_and_sinks_are_those_of_the_model(name, caps):
    errors, shown, whole = compared(name, block=16, logits=CAPS[caps])
    close(errors, whole)
    assert torch.allclose(shown.mass.sum(-1).double(), whole["p"].sum(-1), atol=1e-5)


@pytest.mark.parametrize("name", ["fp16", "kivi", "logquant", "kivi_evict"])
def test_a_sliding_window_hides_tokens_from_both(name):
    errors, shown, whole = compared(name, block=16, window=40)
    close(errors, whole)
    assert shown.mass[..., BINS.sinks + 7 :].sum() == 0  # distances of 64 and more
    assert shown.visible.sum() == 40


@pytest.mark.parametrize("group", [1, 2, 4])
def test_query_heads_of_a_group_share_keys(group):
    errors, _, whole = compared("kivi", block=50, group=group)
    close(errors, whole)


def test_several_queries_at_a_time():
    errors, _, whole = compared("fp16", block=13, count=5)
    close(errors, whole)


@pytest.mark.parametrize("name", METHODS)
def test_signs_and_bounds(name):
    errors, shown, _ = compared(name, block=64)
    l1, kl = errors.l1.sum(-1), errors.kl.sum(-1)
    assert bool((errors.l1 >= 0).all() and (errors.lost >= 0).all() and (errors.parts >= 0).all())
    assert bool((l1 <= 2 + 1e-5).all() and (kl >= -1e-6).all())
    assert bool((l1**2 / 2 <= kl + 1e-5).all()), "Pinsker's inequality"
    assert torch.allclose(errors.mass.sum(-1), torch.ones(()), atol=1e-5)
    assert bool((l1 >= 2 * errors.lost.sum(-1) - 1e-5).all()), "what is dropped is spread over the others"
    assert bool((errors.coverage <= shown.mass + 1e-6).all())
    if name == "fp16":
        assert l1.max() < 1e-6 and errors.output.max() < 1e-6
        assert torch.allclose(errors.coverage, shown.mass, atol=1e-6)
    else:
        assert l1.min() > 1e-4 and errors.output.min() > 1e-4
    if name == "kivi_evict":  # a mere eviction leaves the others' proportions
        left = 1 - errors.lost.sum(-1)
        assert torch.allclose(l1, 2 * (1 - left), atol=1e-5)
        assert torch.allclose(kl, -left.log(), atol=1e-5)


def test_profile_of_a_prompt_for_any_blocks():
    keys, values = zoo.random_kv(TOKENS, 1, HEADS, CHANNELS)
    query, queries = queries_of(TOKENS)
    exact = Exact(keys[0], values[0])
    sees = full_matrix.visible(queries.columns, TOKENS)
    p = full_matrix.softmax(query[0], keys[0].repeat_interleave(2, 0), sees, SCALING)
    for rows, block in [(TOKENS, TOKENS), (TOKENS, 17), (31, 32)]:
        shown = [
            profile(queries[first : first + rows], exact, BINS, positions=TOKENS, block=block, spike=3.0)
            for first in range(0, TOKENS, rows)
        ]
        mass, spikes, seen = (
            torch.cat([getattr(x, name) for x in shown], -2) for name in ("mass", "spikes", "visible")
        )
        assert torch.allclose(mass.double(), full_matrix.by_bin(p, queries.columns, BINS), atol=1e-5)
        limit = 3.0 / sees.sum(-1, keepdim=True)
        assert torch.equal(spikes.double(), full_matrix.by_bin((p > limit).double(), queries.columns, BINS))
        assert torch.equal(seen, full_matrix.by_bin(sees[None].float(), queries.columns, BINS)[0])
        highest = torch.stack([x.highest for x in shown]).amax(0)
        assert torch.allclose(highest.double(), p.amax((0, 1)), atol=1e-5)
        if rows == TOKENS:
            assert torch.allclose(shown[0].mean.double(), p.mean((0, 1)), atol=1e-5)


def test_spikes_are_above_the_mean_of_the_tokens_that_a_query_sees():
    keys, values = zoo.random_kv(TOKENS, 1, HEADS, CHANNELS)
    exact = Exact(keys[0], values[0])
    query, queries = queries_of(TOKENS, window=20)
    sees = full_matrix.visible(queries.columns, TOKENS, 20)
    p = full_matrix.softmax(query[0], keys[0].repeat_interleave(2, 0), sees, SCALING)
    spikes = profile(queries, exact, BINS, spike=2.0).spikes
    above = (p > 2.0 / sees.sum(-1, keepdim=True)).double()
    assert torch.equal(spikes.double(), full_matrix.by_bin(above, queries.columns, BINS)) and spikes.sum() > 9
    only = profile(queries[:1], exact, BINS, spike=1.0)  # a single token has the mean, and not more
    assert only.spikes.sum() == 0 and only.mass.sum() == 4


def test_bins_partition_the_tokens_and_know_the_newest():
    bins = Bins(sinks=2, doublings=8)
    member = bins.one_hot(torch.arange(600)[None], torch.tensor([599]))[0, 0]
    assert torch.equal(member.sum(-1), torch.ones(600))
    assert member[-128:, bins.newest(128)].sum() == 128 == member[:, bins.newest(128)].sum()
    assert bins.names()[:6] == ["token 0", "token 1", "0", "1", "2-3", "4-7"] and bins.names()[-1] == "128-"
    assert len(bins.names()) == bins.count == member.shape[-1]
    assert member[:2].argmax(-1).tolist() == [0, 1] and member[599, 2] == member[598, 3] == member[0, 0] == 1
    for count in (100, 0):
        with pytest.raises(
            ValueError, match=f"{count} tokens do not fill whole bins; allowed numbers of tokens: 1, 2, 4"
        ):
            bins.newest(count)
    assert (bins.newest(1), bins.newest(2), bins.newest(128)) == (slice(2, 3), slice(2, 4), slice(2, 10))
    assert bins.one_hot(torch.tensor([[7]]), torch.tensor([5]))[0, 0, 0, 2] == 1  # later than the query
    assert Bins() == Bins(2, 17) and Bins().count == 20 and Bins().names()[-1] == "65536-"
    assert bins.edges == [0, 1, 2, 4, 8, 16, 32, 64, 128]
