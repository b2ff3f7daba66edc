"""Bytes of a cache, row by row."""

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.methods import load_method
from tests import zoo


@pytest.mark.parametrize("name", ["fp16", "kivi"])
def test_padding_counts_nowhere(name):
    model, method = zoo.model("llama"), load_method(name)
    ids, mask = zoo.padded_batch([20, 50])
    cache = method.new_cache(model, Prompts.from_batch(ids, mask))
    with torch.inference_mode():
        model(ids, attention_mask=mask, past_key_values=cache)
    rows = [cache.bill(row) for row in (0, 1)]
    # layers, sides, heads, channels, bytes
    assert [bill.fp16_equivalent for bill in rows] == [2 * 2 * 2 * 64 * 2 * count for count in (20, 50)]
    assert cache.bill().fp16_equivalent == sum(bill.fp16_equivalent for bill in rows)
    assert [bill.used.window for bill in rows] == [2 * 2 * 2 * 64 * 4 * count for count in (20, 50)]
    assert [bill.ratio for bill in rows] == [1.0, 1.0]  # nothing is packed yet, and the model's dtype is fp32
    method.detach(model)
