"""Rows of unequal lengths in one pass, against one run of equal rows at a time."""

import pytest
import torch

from kvbench.attention import ragged, reference
from kvbench.attention.logits import Logits
from kvbench.methods import load_method
from tests import zoo

#: unequal rows: the first two hold fewer tokens than a tile
PADDING = [90, 90, 0, 13, 13, 4]
FORMATS = ["saw_int4", *(pytest.param(form, marks=pytest.mark.slow) for form in ("octave_k3v4", "q5_1", "iq4_nl"))]
#: exact tokens of the cache
TAILS = [
    pytest.param({}, id="all packed", marks=pytest.mark.slow),
    pytest.param({"sinks": 5, "window": 40}, id="sinks and window"),
]


def stepped(form, steps=3, padding=PADDING, prompt=140, **settings):
    """A layer after padded prompts and some steps, whose tokens are packed before they attend."""
    layer = zoo.new_layer(load_method("engine", format=form, **settings), list(padding))
    keys, values = zoo.random_kv(prompt + steps, len(padding), 2, 64)
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, prompt + steps))]:
        new = keys[:, :, first:last], values[:, :, first:last]
        handle, _ = layer.update(*new)
        k, v = handle.claim()
        if first:
            layer.append(k, v)
            layer.settle(forget=False)
        else:
            layer.end_chunk(*layer.extend_prompt(k, v))
    return layer


@pytest.mark.parametrize("settings", TAILS)
@pytest.mark.parametrize("form", FORMATS)
def test_output_is_that_of_runs_of_equal_rows(form, settings, monkeypatch):
    """The same output for all rows at once, in chunks of rows and in blocks of tokens; with sinks and a softcap too."""
    layer = stepped(form, **settings)
    query = torch.randn(len(PADDING), 4, 1, 64, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(layer.seen) >= torch.tensor(PADDING)[:, None, None, None]
    for logits in (Logits(), Logits(2.0, torch.tensor([3.0, -2.0, 0.5, 6.0]))):
        wanted = reference.attend_reference(torch.nn.Module(), layer, query, mask, 0.2, logits)
        for most, block in ((1 << 24, 1024), (3 * 150 * 128, 1024), (1 << 24, 32)):
            monkeypatch.setattr(ragged, "MOST", most)
            monkeypatch.setattr(ragged, "largest_block", lambda *_, block=block: block)
            out = ragged.attend_ragged(layer, query, mask, 0.2, logits)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("block", "rows"), [(1024, [(0, 2), (2, 4), (4, 6)]), (64, [(0, 4), (4, 6)]), (1, [(0, 6)])])
def test_as_many_rows_at_once_as_their_block_leaves_room_for(block, rows, monkeypatch):
    """A block of the longest row, or the most that is read at once, whichever has fewer tokens."""
    layer, seen = stepped("saw_int4", sinks=5, window=40), []
    query = torch.randn(len(PADDING), 4, 1, 64, generator=torch.Generator().manual_seed(3))
    whole = ragged.attend_ragged(layer, query, None, 0.2)
    attend = ragged.attend_ragged_rows
    monkeypatch.setattr(
        ragged, "attend_ragged_rows", lambda of, some, *more: seen.append(some) or attend(of, some, *more)
    )
    monkeypatch.setattr(ragged, "MOST", 2 * 143 * 2 * 64)  # two rows of 143 tokens, two heads and 64 channels
    monkeypatch.setattr(ragged, "largest_block", lambda *_: block)
    torch.testing.assert_close(ragged.attend_ragged(layer, query, None, 0.2), whole, rtol=1e-5, atol=1e-6)
    assert [(some.start, some.stop) for some in seen] == rows


def test_what_needs_one_run_at_a_time_is_left():
    """Several queries, hidden tokens, additive masks, and groups along tokens."""
    layer = stepped("saw_int4")
    query = torch.randn(len(PADDING), 4, 1, 64)
    mask = torch.arange(layer.seen) >= torch.tensor(PADDING)[:, None, None, None]
    assert ragged.attend_ragged(layer, query, mask, 0.2) is not None
    assert ragged.attend_ragged(layer, query.expand(-1, -1, 2, -1), None, 0.2) is None
    hidden = mask.clone()
    hidden[2, 0, 0, 50] = False
    assert ragged.attend_ragged(layer, query, hidden, 0.2) is None
    assert ragged.attend_ragged(layer, query, mask.float(), 0.2) is None
    kivi = zoo.new_layer(load_method("kivi", quantizer="int2", residual=32), [0, 0])
    kivi.update(*zoo.random_kv(70, 2, 2, 64))[0].claim()
    kivi.end_chunk(*kivi.extend_prompt(*zoo.random_kv(70, 2, 2, 64)))
    assert not ragged.served(kivi)


@pytest.mark.parametrize("settings", TAILS)
@pytest.mark.parametrize("form", FORMATS)
def test_tokens_of_unequal_rows_are_stored_as_in_runs(form, settings, monkeypatch):
    """The same codes and parameters, bit for bit, whether rows are packed together or one run at a time."""
    together = stepped(form, **settings)
    monkeypatch.setattr(type(together.method), "settle_each", lambda self, layer: False)
    runs = stepped(form, **settings)
    assert len(together.row_groups()) == 4
    for one, other in zip(together.segments(), runs.segments(), strict=True):
        assert one.lengths == other.lengths
        if one.packed:
            assert all(map(torch.equal, one.words + one.params, other.words + other.params))
    assert together.firm == runs.firm
