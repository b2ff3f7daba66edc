"""Positions of columns as a model was given them."""

import torch

from kvbench.cache.rope_positions import RopePositions


def test_positions_come_back_for_rows_with_padding_and_jumps():
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 1, 0, 1, 2], [7, 8, 9, 30, 31, 5]])
    held = RopePositions()
    held.see(ids[:, :2], 0, [0, 2, 0])  # of the second row only padding
    held.see(ids[:, 2:], 2, [0, 3, 0])
    columns = torch.arange(6)
    assert held.at(0, columns).tolist() == ids[0].tolist()
    assert held.at(1, columns).tolist() == [0, 0, 0, 0, 1, 2]
    assert held.at(2, columns).tolist() == ids[2].tolist()
    assert held.at(2, torch.tensor([5, 0, 3])).tolist() == [5, 7, 30]
    assert [len(runs) for runs in held.runs] == [1, 1, 3]


def test_what_is_seen_again_replaces_what_stood_there_and_one_row_of_ids_serves_all():
    held = RopePositions()
    held.see(torch.arange(5)[None], 0, [0, 0])
    held.see(torch.tensor([[9, 10]]), 3, [0, 0])
    assert held.at(1, torch.arange(5)).tolist() == [0, 1, 2, 9, 10]
    held.see(torch.tensor([[3, 4, 5]]), 3, [0, 0])
    assert held.runs == [[(0, 0)], [(0, 0)]]


def test_rows_move_and_copies_are_independent():
    held = RopePositions()
    held.see(torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]]), 0, [0, 0])
    twin = held.clone()
    held.shift([0, 2])  # the second row gave back two tokens more
    held.see(torch.tensor([[4], [7]]), 4, [0, 2])
    assert held.at(1, torch.arange(2, 5)).tolist() == [5, 6, 7]
    assert twin.at(1, torch.arange(4)).tolist() == [5, 6, 7, 8]
    twin.select([1, 1, 0])
    assert [twin.at(row, torch.tensor([0])).item() for row in range(3)] == [5, 5, 0]


def test_padding_before_several_runs_has_position_0():
    held = RopePositions()
    held.see(torch.tensor([[9, 9, 9, 5, 6, 20, 21]]), 0, [3])
    assert held.at(0, torch.arange(7)).tolist() == [0, 0, 0, 5, 6, 20, 21]
