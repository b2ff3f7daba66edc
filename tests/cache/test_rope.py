"""Positions of columns as a model was given them, and keys that are rotated by them."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import rope
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import RopePositions
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo


def test_positions_come_back_for_rows_with_padding_and_jumps():
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 1, 0, 1, 2], [7, 8, 9, 30, 31, 5]])
    positions = RopePositions()
    positions.see(ids[:, :2], 0, [0, 2, 0])  # of the second row only padding
    assert positions.at(1, torch.arange(2)).tolist() == [0, 0]
    positions.see(ids[:, 2:], 2, [0, 3, 0])
    columns = torch.arange(6)
    assert positions.at(0, columns).tolist() == ids[0].tolist()
    assert positions.at(1, columns).tolist() == [0, 0, 0, 0, 1, 2]
    assert positions.at(2, columns).tolist() == ids[2].tolist()
    assert positions.at(2, torch.tensor([5, 0, 3])).tolist() == [5, 7, 30]
    assert [len(runs) for runs in positions.runs] == [1, 1, 3]


def test_what_is_seen_again_replaces_what_stood_there_and_one_row_of_ids_serves_all():
    positions = RopePositions()
    positions.see(torch.arange(5)[None], 0, [0, 0])
    positions.see(torch.tensor([[9, 10]]), 3, [0, 0])
    assert positions.at(1, torch.arange(5)).tolist() == [0, 1, 2, 9, 10]
    positions.see(torch.tensor([[3, 4, 5]]), 3, [0, 0])
    assert positions.runs == [[(0, 0)], [(0, 0)]]


def test_rows_move_and_copies_are_independent():
    positions = RopePositions()
    positions.see(torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]]), 0, [0, 0])
    twin = positions.clone()
    positions.shift([0, 2])  # the second row gave back two tokens more
    positions.see(torch.tensor([[4], [7]]), 4, [0, 2])
    assert positions.at(1, torch.arange(2, 5)).tolist() == [5, 6, 7]
    assert twin.at(1, torch.arange(4)).tolist() == [5, 6, 7, 8]
    twin.select([1, 1, 0])
    assert [twin.at(row, torch.tensor([0])).item() for row in range(3)] == [5, 5, 0]
    twin.see(torch.tensor([[20], [30], [40]]), 4, [0, 0, 0])  # copies of a row go on by themselves
    assert [twin.at(row, torch.tensor([4])).item() for row in range(3)] == [20, 30, 40]


def test_padding_before_several_runs_has_position_0():
    positions = RopePositions()
    positions.see(torch.tensor([[9, 9, 9, 5, 6, 20, 21]]), 0, [3])
    assert positions.at(0, torch.arange(7)).tolist() == [0, 0, 0, 5, 6, 20, 21]


def rotated(keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """A rotation that is easy to check: add the position to every channel."""
    moved = positions[:, None, :, None].to(keys.dtype)
    return keys - moved if inverse else keys + moved


def layer_before_rope(starts: list[int], tokens: int = 8) -> tuple[KVLayer, torch.Tensor]:
    """A layer that stores keys before RoPE, whose rows begin at position 0, and these keys."""
    layer = zoo.new_layer(load_method("fp16"), starts)
    layer.rope = rotated
    keys, values = zoo.random_kv(tokens, len(starts))
    ids = torch.stack([torch.arange(tokens) - start for start in starts])
    layer.progress.positions.see(ids, 0, starts)
    zoo.feed(layer, keys, values)
    return layer, keys


def test_a_prompt_is_rotated_by_the_positions_of_each_row():
    layer, keys = layer_before_rope([0, 3])
    moved = rope.rotated_prompt(layer, keys) - keys
    assert moved[0, 1, :, 5].round().tolist() == list(range(8))
    assert moved[1, 0, :, 0].round().tolist() == [0, 0, 0, 0, 1, 2, 3, 4]  # padding has position 0
    layer.rope = None
    assert rope.rotated_prompt(layer, keys) is keys


def test_slots_are_rotated_by_the_positions_of_their_tokens():
    layer, keys = layer_before_rope([0, 3])
    second = slice(1, 2)
    moved = rope.rotated_slots(layer, second, 1, 4, keys[second, :, 4:7]) - keys[second, :, 4:7]
    assert moved[0, 0, :, 0].round().tolist() == [1, 2, 3]
    layer.order[0] = torch.tensor([7, 0, 1, 2, 3, 4, 5, 6])
    one = slice(0, 1)
    moved = rope.rotated_slots(layer, one, 0, 4, keys[one, :, :4]) - keys[one, :, :4]
    assert moved[0, 1, :, 2].round().tolist() == [7, 0, 1, 2]
    moved = rope.rotated_slots(layer, one, 5, 7, keys[one, :, :2]) - keys[one, :, :2]
    assert moved[0, 1, :, 2].round().tolist() == [4, 5]
    layer.order[0] = torch.arange(8).expand(2, 8)
    with pytest.raises(CacheError, match=r"same tokens in all heads"):
        rope.rotated_slots(layer, one, 0, 3, keys[one, :, :3])
    layer.rope = None
    assert rope.rotated_slots(layer, one, 0, 3, keys) is keys


def test_keys_are_converted_only_where_one_cache_stores_them_before_rope_and_the_other_after_it():
    layer, keys = layer_before_rope([0, 3])
    layer.follower = zoo.new_layer(load_method("fp16"))
    second = slice(1, 2)
    part = keys[second, :, 4:7].half()
    after = layer.handed_on(second, part, 4)
    assert torch.equal(after, part + torch.tensor([1.0, 2.0, 3.0]).half()[:, None])
    layer.rope, layer.follower.rope = None, rotated
    before = layer.handed_on(second, part, 4)
    assert before.dtype == torch.float16
    assert torch.equal(before, (part.float() - torch.tensor([1.0, 2.0, 3.0])[:, None]).half())
    layer.rope = rotated
    assert layer.handed_on(second, part, 4) is part
    layer.rope = layer.follower.rope = None
    assert layer.handed_on(second, part, 4) is part


def test_columns_are_rotated_by_their_positions_in_each_row():
    layer = zoo.new_layer(load_method("fp16"))
    layer.batch, layer.rope = 2, rotated
    layer.progress.positions.see(torch.tensor([[0, 1, 2, 3], [9, 9, 0, 1]]), 0, [0, 2])
    turned = rope.rotated_columns(layer, 1, torch.zeros(2, 1, 3, 4))
    assert turned[:, 0, :, 0].tolist() == [[1, 2, 3], [0, 0, 1]]


def test_a_run_ends_where_positions_jump_and_one_that_goes_on_is_not_cut():
    positions = RopePositions()
    positions.see(torch.tensor([[3, 4, 5]]), 0, [0])
    positions.see(torch.tensor([[6, 7, 20]]), 3, [0])
    assert positions.runs == [[(0, 3), (5, 20)]]
    positions.see(torch.tensor([[8]]), 5, [0])  # the last column again
    assert positions.runs == [[(0, 3)]]
    positions.see(torch.tensor([[1, 2], [1, 2]]), 0, [0, 1])  # another batch
    assert positions.runs == [[(0, 1)], [(1, 2)]]
    positions.select([1])
    assert positions.runs == [[(1, 2)]]
