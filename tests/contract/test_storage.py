"""What a cache stores does not depend on the dtype in which the model computes."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kvbench.cache.segments.base import FullSegment
from kvbench.decoding import generate
from kvbench.errors import CacheError
from kvbench.util.attachment import Placement, record_placement
from tests import zoo
from tests.contract.test_methods import ANSWERS, LENGTHS, PLAIN, answer, held, make

LLAMA = "llama"


@cache
def wide() -> PreTrainedModel:
    """The bfloat16 model with its weights in float32, whose caches store in bfloat16."""
    model = copy.deepcopy(zoo.model(LLAMA, torch.bfloat16)).float()
    record_placement(model, Placement(storage=torch.bfloat16))
    return model


def test_a_users_model_in_float32_can_have_a_cache_in_16_bits() -> None:
    ids, mask = zoo.padded_batch([40])
    plain, narrow = (make("quantspec:draft", None).new_cache(zoo.model(LLAMA)) for _ in range(2))
    narrow.storage = torch.bfloat16
    for kv in (plain, narrow):
        generate(zoo.model(LLAMA), kv, ids, mask, max_new_tokens=2)
    assert (plain.storage, plain.bill().width, narrow.storage, narrow.bill().width) == (None, 4, torch.bfloat16, 2)
    assert narrow.bill().used.window * 2 == plain.bill().used.window
    with pytest.raises(CacheError, match="set its storage before the first forward pass"):
        narrow.storage = torch.float16


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_wider_arithmetic_stores_the_same_bytes(name: str, quantizer: str | None) -> None:
    ids, mask = zoo.padded_batch(LENGTHS, seed=1)
    made, bills = {}, {}
    for model in (zoo.model(LLAMA, torch.bfloat16), wide()):
        made[model.dtype], kv = answer(make(name, quantizer), model, ids, mask, prefill_rows=None, **ANSWERS)
        bills[model.dtype] = kv.bill()
        assert {layer.dtype for layer in kv.kv_layers} == {torch.bfloat16}
        exact = [part for layer in kv.kv_layers for part in layer.segments() if isinstance(part, FullSegment)]
        assert {part.buffer.dtype for part in exact} <= {torch.bfloat16}
        assert held(kv) == kv.bill().reserved.total
    used, wanted = bills[torch.float32].used, bills[torch.bfloat16].used
    if name.startswith("kvquant"):  # how many outliers there are depends on the values
        assert (used.codes, used.scales) == (wanted.codes, wanted.scales)
        assert used.window == pytest.approx(wanted.window, rel=0.01)
    else:
        assert bills[torch.float32] == bills[torch.bfloat16]
    likelihoods = [torch.tensor([sum(row) for row in made[dtype].answer_nll]) for dtype in made]
    torch.testing.assert_close(likelihoods[1], likelihoods[0], rtol=0.05, atol=0.1)
