"""Prompts that attend to what is stored of them: some queries at a time, in one piece and in chunks, padded and not."""

import pytest
import torch

from kvbench.attention import over_stores
from kvbench.cache import Prompts
from kvbench.methods import load_method
from tests import zoo

METHODS = {
    "after": {"prefill": "quantized"},
    "before": {"prefill": "quantized", "rope": "pre"},
}


def logits_of(model, method, ids, mask, pieces, queries, monkeypatch):
    monkeypatch.setattr(over_stores, "QUERIES", queries)
    cache, outs, first = method.new_cache(model, Prompts.from_batch(ids, mask)), [], 0
    with torch.no_grad():
        for count in pieces:
            last = first + count
            positions = (mask[:, :last].cumsum(-1) - 1).clamp(min=0)[:, first:]
            outs.append(
                model(
                    input_ids=ids[:, first:last],
                    attention_mask=mask[:, :last],
                    position_ids=positions,
                    past_key_values=cache,
                ).logits
            )
            first = last
    assert cache.progress.prefill.path == "stored" and all(layer.sealed for layer in cache.layers)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("lengths", [[60], [47, 60]], ids=["alone", "padded batch"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_queries_some_at_a_time_and_chunks_see_what_one_piece_sees(architecture, lengths, name, monkeypatch):
    model, method = zoo.model(architecture), load_method("atom", **METHODS[name])
    ids, mask = zoo.padded_batch(lengths)
    whole = logits_of(model, method, ids, mask, [60], 1024, monkeypatch)
    real = mask.bool()
    for pieces, queries in (([60], 7), ([60], 1), ([59, 1], 1024), ([20, 1, 30, 9], 8)):
        other = logits_of(model, method, ids, mask, pieces, queries, monkeypatch)
        torch.testing.assert_close(other[real], whole[real], rtol=1e-4, atol=1e-5)
    # the first tokens are those of the text alone: no query sees a later token
    short = logits_of(model, method, ids[:, :40], mask[:, :40], [40], 9, monkeypatch)
    torch.testing.assert_close(short[real[:, :40]], whole[:, :40][real[:, :40]], rtol=1e-4, atol=1e-5)
    method.detach(model)
