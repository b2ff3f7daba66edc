"""Bytes of a cache, row by row."""

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.cache.bill import Bill, Parts
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


def test_parts_are_added_by_name_and_sum_up():
    parts = Parts(1, 20, 300, 4000, 50000)
    assert parts.total == 54321
    for part in ("codes", "scales", "window", "index", "state"):
        parts.add(part, 2)
    names = {"total": 54331, "codes": 3, "scales": 22, "window": 302, "index": 4002, "state": 50002}
    assert parts.as_dict() == names and Parts().total == 0


def test_a_draft_adds_to_what_is_used_and_reserved_and_not_to_what_it_is_compared_with():
    bill = Bill(Parts(codes=10, scales=2), Parts(codes=20), 96, 4)
    assert bill.ratio == 96 * 2 / 12 and Bill(Parts(codes=12), Parts(), 96).ratio == 8
    bill.add(Bill(Parts(codes=1, state=5), Parts(window=7), 1000, 2))
    assert (bill.used, bill.reserved) == (Parts(11, 2, state=5), Parts(20, window=7))
    assert (bill.fp16_equivalent, bill.width) == (96, 4)
    keys = {"used": bill.used.as_dict(), "reserved": bill.reserved.as_dict(), "fp16_equivalent": 96}
    assert bill.as_dict() == keys
    assert Bill(Parts(), Parts(), 96).ratio != Bill(Parts(), Parts(), 96).ratio  # NaN
