"""The cache of a draft model: it gets the target's prompt, and copies the tokens that the target has kept."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import KVCache
from kvbench.cache.progress import Options
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo
from tests.cache.test_cache import feed, filled

ALL = slice(None)


def rotated(keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """A rotation that is easy to check: add the position to every channel."""
    moved = positions[:, None, :, None].to(keys.dtype)
    return keys - moved if inverse else keys + moved


def pair(tokens: int = 9, starts: list[int] | None = None, name: str = "fp16") -> tuple[KVCache, KVCache]:
    """A target's cache and a draft's, which were given the same prompt."""
    leader, follower = KVCache(load_method("fp16"), 2), KVCache(load_method(name), 2)
    leader.lead(follower)
    for cache in (leader, follower):
        cache.progress.padding.starts = starts
    feed(leader, *zoo.random_kv(tokens, len(starts or [0])))
    return leader, follower


def test_a_drafts_cache_gets_the_prompt_layer_by_layer():
    leader, follower = pair(starts=[0, 2])
    keys, values = zoo.random_kv(9, 2)
    for layer in follower.layers:
        assert layer.sealed and layer.seen == 9
        for row, start in enumerate((0, 2)):
            for store, x in zip(layer.stores(), (keys, values), strict=True):
                assert torch.equal(store.tail.view(slice(row, row + 1))[0], x[row, :, start:])
    assert [layer.chain() for layer in leader.layers] == [
        [*both] for both in zip(leader.layers, follower.layers, strict=True)
    ]
    leader.lead(None)
    assert leader.follower is None and [layer.chain() for layer in leader.layers] == [
        [layer] for layer in leader.layers
    ]


def test_search_times_add_up_and_notes_are_the_drafts():
    for mine, other, total in ((1.5, 0.25, 1.75), (None, 1.0, None), (1.0, None, None)):
        leader, follower = (KVCache(load_method("fp16"), 1) for _ in range(2))
        leader.search_s, follower.search_s = mine, other
        leader.notes = [{"chunks": 3}]
        leader.lead(follower)
        assert leader.search_s == total and leader.notes == [{"chunks": 3}]
    leader, follower = (KVCache(load_method("fp16"), 1) for _ in range(2))
    assert leader.search_s == 0.0 and leader.notes is None
    follower.notes = [{"chunks": 1}, {"chunks": 2}]
    leader.lead(follower)
    assert leader.notes == [{"draft": {"chunks": 1}}, {"draft": {"chunks": 2}}]


def test_what_concerns_both_caches_reaches_the_draft():
    leader, follower = pair(starts=[0, 2])
    leader.options = Options(kernels="reference")
    assert leader.options == follower.options == Options(kernels="reference")
    assert Options() == Options(kernels="auto", prefill="auto", mlp_chunk="auto")
    one, own = KVCache(load_method("fp16"), 1), filled()
    one.options = Options(prefill="stock")
    assert one.options.prefill == "stock" and own.options.prefill == "auto"
    # bytes of both
    alone = filled(starts=[0, 2]).bill(1)
    both = leader.bill(1)
    assert both.used.total == 2 * alone.used.total and both.reserved.total == 2 * alone.reserved.total
    assert both.fp16_equivalent == alone.fp16_equivalent  # a stock cache holds the tokens once
    # rows
    leader.reorder_cache(torch.tensor([1, 1, 0]))
    assert follower.progress.padding.starts == [2, 2, 0] and follower.layers[0].batch == 3
    with leader.only(slice(1, 2), 3):
        assert follower.progress.prefill.group == (slice(1, 2), 3)
    assert follower.progress.prefill.group is None
    twin = leader.clone()
    assert twin.follower is not None and twin.follower is not follower
    assert [layer.follower for layer in twin.layers] == twin.follower.layers
    assert leader.layers[0].follower is follower.layers[0] and leader.follower is follower
    leader.reset()
    assert follower.get_seq_length() == 0 and twin.follower.get_seq_length() == 9


def test_a_copy_keeps_search_time_and_notes():
    leader, follower = (KVCache(load_method("fp16"), 1) for _ in range(2))
    leader.search_s, follower.search_s, follower.notes = 1.0, 2.0, [{"chunks": 1}]
    leader.lead(follower)
    twin = leader.clone()
    assert twin.search_s == 3.0 and twin.notes == [{"draft": {"chunks": 1}}]


def test_a_draft_follows_the_target_row_by_row():
    """The target has kept three new tokens of the first row and one of the second; the draft copies them."""
    leader, follower = pair(starts=[0, 2])
    follower.layers[0].order[1] = torch.arange(2, 9)
    new = zoo.random_kv(4, 2, seed=5)
    feed(leader, *new)
    leader.progress.positions.see(torch.arange(13)[None], 0, [0, 2])
    leader.take_back([1, 3])  # 3 and 1 of the 4 new tokens stay: the second row moves by two columns
    with pytest.raises(CacheError, match="has seen 9 tokens and the target's 12, but they should differ by 2"):
        follower.follow(leader, [2, 1])
    follower.follow(leader, [3, 1])
    assert follower.get_seq_length() == leader.get_seq_length() == 12
    assert follower.progress.padding.starts == leader.progress.padding.starts == [0, 4]
    assert follower.progress.padding.starts is not leader.progress.padding.starts
    assert follower.progress.positions == leader.progress.positions
    assert follower.progress.positions is not leader.progress.positions
    for layer, source in zip(follower.layers, leader.layers, strict=True):
        for row in range(2):
            one = slice(row, row + 1)
            for store, other in zip(layer.stores(), source.stores(), strict=True):
                assert torch.equal(store.tail.view(one), other.tail.view(one))
        assert layer.firm == [0, 2]
    assert follower.layers[0].positions(1).tolist() == list(range(4, 12))


def test_a_target_without_padding_gives_the_draft_none():
    leader, follower = pair()
    feed(leader, *zoo.random_kv(1, seed=5))
    follower.follow(leader, [1])
    assert follower.progress.padding.starts == [0]


def test_keys_before_rope_are_rotated_for_a_draft_that_stores_them_after_it():
    """Both ways, in the prompt and in the tokens that the draft copies."""
    for source in (True, False):
        leader, follower = (KVCache(load_method("fp16"), 1) for _ in range(2))
        leader.lead(follower)
        (leader if source else follower).layers[0].rope = rotated
        keys, values = (torch.zeros(1, 2, 8, 32) for _ in range(2))
        leader.progress.positions.see(torch.arange(100, 108)[None], 0, [0])
        feed(leader, keys[:, :, :6], values[:, :, :6])
        feed(leader, keys[:, :, 6:], values[:, :, 6:])
        assert follower.progress.positions == leader.progress.positions
        follower.follow(leader, [2])
        sign = 1.0 if source else -1.0
        assert follower.layers[0].stores()[0].tail.view(ALL)[0, 0, :, 0].tolist() == [sign * p for p in range(100, 108)]
        assert not follower.layers[0].stores()[1].tail.view(ALL).any()
