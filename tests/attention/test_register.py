"""The function that models call, on layers without a model: spans that settle in between, own tokens, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.attention import register
from kvbench.attention.logits import PLAIN
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Padding, Progress
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import slow, zoo

PROMPT, NEW = 60, 13
PADDING = [0, 7]
#: an attention module with two query heads per KV head, as SDPA asks for it
GROUPED = torch.nn.Module()
GROUPED.num_key_value_groups = 2
#: methods that pack or drop tokens within the new ones
METHODS = {
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32}),
    "logquant": ("logquant", {"window": 4}),
    "streamingllm": ("streamingllm", {"budget": 40, "position": "original"}),
    "atom": ("atom", {"prefill": "quantized"}),
    "atom, exact": ("atom", {}),
}


def filled(name: str, window: int | None = None, starts: list[int] | None = None) -> KVLayer:
    """A layer after a prompt."""
    base, settings = METHODS[name]
    starts = list(PADDING if starts is None else starts)
    layer = KVLayer(load_method(base, **settings), 0, Progress(padding=Padding(starts)), window)
    zoo.feed(layer, *(x[:, :, :PROMPT] for x in tokens(len(starts))))
    return layer


def tokens(batch: int) -> tuple[Tensor, Tensor]:
    return zoo.random_kv(PROMPT + NEW, batch, channels=64)


def queries(batch: int) -> Tensor:
    return torch.randn(batch, 4, NEW, 64, generator=torch.Generator().manual_seed(5))


def step(layer: KVLayer, first: int, last: int, mask: Tensor | None) -> Tensor:
    """The output of the new tokens ``first..last-1``, whose mask has the rows and columns of all new tokens."""
    batch, at = layer.batch, slice(PROMPT + first, PROMPT + last)
    handle, _ = layer.update(*(x[:, :, at] for x in tokens(batch)))
    part = None if mask is None else mask[:, :, first:last, : PROMPT + last]
    return register.step(GROUPED, layer, queries(batch)[:, :, first:last], *handle.claim(), part, 0.2, PLAIN)


def masks(kind: str) -> Tensor | None:
    """No mask, a plain one (padding and later tokens), or one that hides more: of the new tokens ``[B, 1, q, kv]``."""
    columns, newest = torch.arange(PROMPT + NEW), PROMPT + torch.arange(NEW)[:, None]
    mask = (columns <= newest) & (columns >= torch.tensor(PADDING)[:, None, None, None])
    if kind == "hiding":
        mask = mask & ((columns + newest) % 5 > 0) | (columns == newest)
    return None if kind == "none" else mask


@pytest.mark.parametrize(
    ("name", "kind", "span"),
    [
        *(("kivi", kind, span) for kind in ("none", "plain", "hiding") for span in (1, 4)),
        ("kivi", "hiding", NEW),
        ("logquant", "none", 4),
        ("logquant", "hiding", 1),
        ("streamingllm", "plain", 4),
        ("atom", "hiding", 4),
    ],
)
def test_a_span_settles_between_its_parts_as_steps_of_their_own_do(name: str, kind: str, span: int) -> None:
    mask, together, apart = masks(kind), filled(name), filled(name)
    together.progress.span = span
    found = step(together, 0, NEW, mask)
    # where it is known in advance when a token is packed, each token sees the others as in a step of its own
    own = 1 if name in ("kivi", "logquant") and span < NEW else span
    wanted = [step(apart, first, min(first + own, NEW), mask) for first in range(0, NEW, own)]
    torch.testing.assert_close(found, torch.cat(wanted, 1))
    assert together.seen == apart.seen == PROMPT + NEW
    for row in range(2):
        assert torch.equal(together.positions(row), apart.positions(row))
        for mine, other in zip(together.stores(), apart.stores(), strict=True):
            assert mine.signature(row) == other.signature(row)
    if span < NEW and name != "atom":
        at_once = step(filled(name), 0, NEW, mask)
        assert not torch.allclose(found, at_once, atol=1e-3)  # later tokens would see what should have been packed


def test_an_eager_method_packs_its_own_tokens_before_they_attend() -> None:
    layer = filled("atom", starts=[0])
    out = step(layer, 0, 3, None)
    assert [store.tail.length(slice(0, 1)) for store in layer.stores()] == [0, 0]
    held = [slow.atom(x[:, :, : PROMPT + 3], 4) for x in tokens(1)]
    torch.testing.assert_close(out, slow.attention(queries(1)[:, :, :3], *held, 0.2), rtol=1e-4, atol=1e-5)
    later = filled("atom, exact", starts=[0])
    step(later, 0, 3, None)
    assert [store.tail.length(slice(0, 1)) for store in later.stores()] == [3, 3]  # packed before the next step


def test_own_tokens_are_packed_before_anything_leaves_a_sliding_window() -> None:
    """The first of the new tokens still sees what the last one no longer does."""
    window, count = 10, NEW
    columns, newest = torch.arange(PROMPT + NEW), PROMPT + torch.arange(NEW)[:, None]
    mask = ((columns <= newest) & (columns > newest - window))[None, None]
    sliding, whole = (filled("atom", w, starts=[0]) for w in (window, None))
    torch.testing.assert_close(step(sliding, 0, count, mask), step(whole, 0, count, mask))
    assert sliding.length(slice(0, 1)) < whole.length(slice(0, 1)) == PROMPT + count
    before = sliding.length(slice(0, 1))
    sliding.settle()
    assert sliding.length(slice(0, 1)) < before  # the test means something: there was more to drop


def test_padding_among_the_new_tokens_is_refused() -> None:
    mask = masks("plain")
    assert mask is not None
    mask[1, :, 2, PROMPT + 2] = False
    with pytest.raises(CacheError, match="masked tokens after the prompt"):
        step(filled("kivi"), 0, 4, mask)


@pytest.mark.parametrize("sealed", [False, True])
def test_scores_are_divided_by_the_root_of_the_channels_unless_a_model_scales_them(sealed: bool) -> None:
    outs = []
    for scaling in (None, 1 / 8, 1 / 4):
        layer = filled("kivi", starts=[0]) if sealed else zoo.new_layer(load_method("fp16"))
        key, value = layer.update(*(x[:, :, PROMPT:] for x in tokens(1)))
        outs.append(register.model_attention(GROUPED, queries(1), key, value, None, scaling)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.allclose(outs[0], outs[2], atol=1e-2)


def test_arguments_that_no_store_serves_are_refused_by_name() -> None:
    layer = zoo.new_layer(load_method("fp16"))
    key, value = layer.update(*(x[:, :, :NEW] for x in tokens(1)))
    with pytest.raises(CacheError, match="Module uses 'position_bias' in attention"):
        register.model_attention(GROUPED, queries(1), key, value, None, position_bias=torch.zeros(1))
    out, weights = register.model_attention(GROUPED, queries(1), key, value, None, position_bias=None)
    assert out.shape == (1, NEW, 4, 64) and weights is None
    with pytest.raises(CacheError, match="already used"):
        register.model_attention(GROUPED, queries(1), key, value, None)


def test_without_a_cache_of_ours_nothing_is_stored_and_arguments_go_on() -> None:
    keys, values = (x[:, :, :NEW] for x in tokens(1))
    out, _ = register.model_attention(GROUPED, queries(1), keys, values, None, 0.2)
    hidden = torch.full((NEW, NEW), -math.inf).triu(1)
    scores = queries(1) @ keys.repeat_interleave(2, 1).transpose(-1, -2) * 0.2 + hidden
    torch.testing.assert_close(out, (scores.softmax(-1) @ values.repeat_interleave(2, 1)).transpose(1, 2))
    capped, _ = register.model_attention(GROUPED, queries(1), keys, values, None, 0.2, softcap=1.0)
    assert not torch.allclose(out, capped, atol=1e-2)


def test_a_model_attached_twice_remembers_its_own_attention() -> None:
    model = zoo.model.__wrapped__("llama")
    register.detach(model)
    assert model.config._attn_implementation == "sdpa"
    register.attach(model)
    register.attach(model)
    assert model.config._attn_implementation == "kvbench"
    register.detach(model)
    assert model.config._attn_implementation == "sdpa"
