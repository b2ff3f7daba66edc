"""The reference path against softmax over the dequantized slots: any mask, any order of slots."""

import math

import pytest
import torch

from kvbench.attention import prefill, reference
from kvbench.attention.logits import Logits
from kvbench.methods import load_method
from tests import zoo

PADDING = [0, 13, 13, 4]
#: an attention module of two query heads a KV head, as SDPA asks for it
GROUPED = torch.nn.Module()
GROUPED.num_key_value_groups = 2
METHODS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 3}),
    "logquant": ("logquant", {"window": 12}),
    "partial_logquant": ("partial_logquant", {"window": 12}),
    "snapkv": ("snapkv", {"budget": 40, "window": 8}),
    "h2o": ("h2o", {"budget": 40, "evict": "prefill"}),
    "streamingllm": ("streamingllm", {"budget": 40, "position": "original"}),
}


def placed(name, prompt=120, steps=(1, 1, 3, 5), heads=2, channels=64):
    """A layer after a padded prompt and some steps; the last step's tokens are the newest."""
    base, settings = METHODS[name]
    layer = zoo.new_layer(load_method(base, **settings), list(PADDING))
    keys, values = zoo.random_kv(prompt + sum(steps), len(PADDING), heads, channels)
    queries = torch.randn(len(PADDING), 2 * heads, prompt, channels, generator=torch.Generator().manual_seed(5))
    first = 0
    for count in (prompt, *steps):
        k, v = (x[:, :, first : first + count] for x in (keys, values))
        handle, _ = layer.update(k, v)
        k, v = handle.claim()
        if first:
            layer.append(k, v)
        else:
            wanted = layer.method.observe_prompt
            if wanted:
                mask = prefill.rows_of(torch.arange(prompt) >= torch.tensor(PADDING)[:, None], 0, prompt, prompt)
                scores = (queries @ k.repeat_interleave(2, 1).transpose(-1, -2)).masked_fill(~mask, -math.inf)
                seen = scores.softmax(-1).nan_to_num(0.0)
                layer.observed = seen[:, :, -wanted:] if wanted > 0 else seen.sum(2, keepdim=True)
            layer.end_chunk(*layer.extend_prompt(k, v))
        first += count
    return layer


def dense(layer, row):
    """Keys and values of a row ``[H, n, D]`` in slot order, and the columns of its slots ``[H, n]``."""
    one = slice(row, row + 1)
    k, v = (
        torch.cat([s.read(one, 0, s.lengths[row], torch.float32) for s in store.segments], 2)[0]
        for store in layer.stores()
    )
    return k, v, layer.positions(row).expand(layer.heads, -1)


@pytest.mark.parametrize(
    "logits", [Logits(), Logits(2.0, torch.tensor([3.0, -2.0, 0.5, 6.0]))], ids=["plain", "capped"]
)
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "one row", "one token", "one token, bool"])
@pytest.mark.parametrize("name", METHODS)
def test_any_mask_over_any_order_of_slots(name, kind, logits):
    """Masks count columns of the padded batch; slots may stand in any order, and heads may hold other tokens."""
    layer = placed(name)
    generator = torch.Generator().manual_seed(7)
    count = 1 if "token" in kind else 5
    query = torch.randn(len(PADDING), 4, count, 64, generator=generator)
    newest = torch.arange(layer.seen - count, layer.seen)
    columns = torch.arange(layer.seen)
    causal = columns <= newest[:, None]
    real = columns >= torch.tensor(PADDING)[:, None, None, None]
    mask, bias = None, torch.zeros(len(PADDING), 1, count, layer.seen)
    if kind in ("bool", "one token, bool", "additive"):
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.3, -math.inf)
        bias[..., -count:] = 0.0
    bias = bias.masked_fill(~(causal & real), -math.inf)
    if kind in ("bool", "one token, bool"):
        mask = bias == 0
    elif kind == "additive":
        bias = bias + torch.randn(bias.shape, generator=generator)
        mask = bias.clamp(min=torch.finfo(torch.float32).min)
    elif kind == "one row":
        mask = causal[None, None]
    out = reference.attend_reference(GROUPED, layer, query, mask, 0.2, logits)
    for row in range(len(PADDING)):
        k, v, at = dense(layer, row)
        scores = logits.capped(query[row] @ k.repeat_interleave(2, 0).transpose(-1, -2) * 0.2)
        here = bias[row].expand(4, -1, -1).gather(-1, at.repeat_interleave(2, 0)[:, None].expand(-1, count, -1))
        scores = scores + here
        if logits.sinks is not None:
            scores = torch.cat([scores, logits.sinks[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        wanted = (weights @ v.repeat_interleave(2, 0)).transpose(0, 1)
        torch.testing.assert_close(out[row], wanted, rtol=1e-4, atol=1e-5)


def test_heads_of_the_evicting_methods_hold_other_tokens_here():
    """Check the assumption of the test above."""
    for name in ("snapkv", "h2o"):
        positions = placed(name).positions(0)
        assert positions.ndim == 2 and not torch.equal(positions[0], positions[1])


@pytest.mark.parametrize("name", ["kivi", "logquant", "fp16"])
def test_probabilities_of_a_step_are_those_of_its_output(name, monkeypatch):
    """In slot order, over blocks and segments; they sum to one, or to what the sinks leave."""
    monkeypatch.setattr(reference, "BLOCK", 16)
    monkeypatch.setattr(reference, "ELEMENTS", 1)
    layer = placed(name)
    query = torch.randn(4, 4, 5, 64, generator=torch.Generator().manual_seed(7))
    for logits in (Logits(), Logits(None, torch.tensor([3.0, -2.0, 0.5, 6.0]))):
        for rows in layer.row_groups():
            mask = reference.mask_over_slots(layer, rows, query, None)
            out, weights = reference.merge_blocks(layer, rows, query[rows], mask, 0.2, logits, keep=True)
            for number, row in enumerate(range(*rows.indices(4))):
                k, v, _ = dense(layer, row)
                torch.testing.assert_close(
                    out[number], weights[number] @ v.repeat_interleave(2, 0), rtol=1e-4, atol=1e-5
                )
                scores = query[row] @ k.repeat_interleave(2, 0).transpose(-1, -2) * 0.2
                scores = scores.masked_fill(~mask[0], -math.inf)
                top = torch.logsumexp(scores, -1)
                if logits.sinks is not None:
                    top = torch.logaddexp(top, logits.sinks[:, None].expand_as(top))
                torch.testing.assert_close(weights[number], torch.exp(scores - top[..., None]), rtol=1e-4, atol=1e-6)


def test_a_block_is_the_most_that_is_dequantized_at_once(monkeypatch):
    from kvbench.cache.segments.packed import PackedSegment

    layer = placed("kivi")
    longest, read = [], PackedSegment.read
    monkeypatch.setattr(reference, "BLOCK", 16)
    monkeypatch.setattr(reference, "ELEMENTS", 1)

    def spied(self, rows, start, stop, *more):
        longest.append(stop - start)
        return read(self, rows, start, stop, *more)

    monkeypatch.setattr(PackedSegment, "read", spied)
    reference.attend_reference(GROUPED, layer, torch.randn(4, 4, 1, 64), None, 0.2)
    assert max(longest) == 16
    row = slice(0, 1)
    slots = layer.stores()[0].length(row)
    assert [stop for _, stop in reference.slot_blocks(layer, row)][:-1] == [
        start for start, _ in reference.slot_blocks(layer, row)
    ][1:]
    assert reference.slot_blocks(layer, row)[0][0] == 0 and reference.slot_blocks(layer, row)[-1][1] == slots


def test_a_block_has_as_many_tokens_as_make_its_elements(monkeypatch):
    """Two rows of two heads, and values wider than keys."""
    monkeypatch.setattr(reference, "BLOCK", 4)
    monkeypatch.setattr(reference, "ELEMENTS", 10 * 2 * 2 * 128)
    layer = zoo.new_layer(load_method("fp16"))
    zoo.feed(layer, zoo.random_kv(25, 2, channels=64)[0], zoo.random_kv(25, 2, channels=128)[1])
    assert reference.slot_blocks(layer, slice(0, 2)) == [(0, 10), (10, 20), (20, 25)]
    assert reference.slot_blocks(layer, slice(1, 2)) == [(0, 20), (20, 25)]
    monkeypatch.setattr(reference, "BLOCK", 12)
    assert reference.slot_blocks(layer, slice(0, 2)) == [(0, 12), (12, 24), (24, 25)]


@pytest.mark.parametrize(
    "logits", [Logits(), Logits(None, torch.tensor([3.0, -2.0, 0.5, 6.0]))], ids=["plain", "sinks"]
)
def test_rows_of_padding_only_attend_to_nothing(logits):
    layer, query = zoo.new_layer(load_method("fp16")), torch.randn(1, 4, 3, 64)
    zoo.feed(layer, zoo.random_kv(0, channels=64)[0], zoo.random_kv(0, channels=32)[1])
    out, weights = reference.merge_blocks(layer, slice(0, 1), query, None, 0.2, logits, keep=True)
    assert out.shape == (1, 4, 3, 32) and not out.any() and weights.shape == (1, 4, 3, 0)
    assert reference.merge_blocks(layer, slice(0, 1), query, None, 0.2, logits)[1] is None


@pytest.mark.parametrize("per_row", [True, False], ids=["a mask for each row", "one mask"])
def test_rows_that_are_read_apart_have_their_own_mask(per_row, monkeypatch):
    """As few rows at a time as fit into a processor's cache: each sees what its own row of the mask shows."""
    layer = placed("kivi")
    count = layer.seen
    query = torch.randn(4, 4, 3, 64, generator=torch.Generator().manual_seed(8))
    mask = torch.rand(4 if per_row else 1, 1, 3, count, generator=torch.Generator().manual_seed(9)) < 0.5
    whole = reference.attend_reference(GROUPED, layer, query, mask, 0.2)
    calls, merge = [], reference.merge_blocks

    def spied(layer, rows, *more, **options):
        calls.append((rows.start, rows.stop))
        return merge(layer, rows, *more, **options)

    monkeypatch.setattr(reference, "merge_blocks", spied)
    monkeypatch.setattr(reference, "ELEMENTS", 1)
    apart = reference.attend_reference(GROUPED, layer, query, mask, 0.2)
    assert calls == [(0, 1), (1, 2), (2, 3), (3, 4)]  # rows 1 and 2 have equal padding
    torch.testing.assert_close(apart, whole, rtol=1e-4, atol=1e-5)
