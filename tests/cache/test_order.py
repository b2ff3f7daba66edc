"""Positions that grow."""

import torch

from kvbench.cache.order import extended


def test_positions_grow_without_being_copied_each_time():
    positions, moved = torch.randperm(1000), 0
    wanted = positions.tolist()
    for step in range(1000, 3000, 2):
        before = positions.data_ptr()
        older = positions
        positions = extended(positions, torch.arange(step, step + 2))
        moved += positions.data_ptr() != before
        assert len(older) == step
    assert positions.tolist() == wanted + list(range(1000, 3000))
    assert moved <= 4


def test_what_others_hold_stays_as_it_is():
    first = extended(torch.arange(5), torch.arange(5, 6))
    second = extended(first, torch.arange(6, 7))
    third = extended(first, torch.arange(6, 8))
    assert first.tolist() == list(range(6))
    assert second.tolist() == list(range(7)) and third.tolist() == list(range(8))
    shorter = extended(second[:3] + 10, torch.arange(13, 14))
    assert shorter.tolist() == [10, 11, 12, 13] and second.tolist() == list(range(7))


def test_positions_of_heads_and_strided_ones():
    heads = torch.arange(6).view(2, 3)
    assert extended(heads, torch.tensor([[9], [9]])).tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert extended(torch.arange(10)[::2], torch.tensor([7])).tolist() == [0, 2, 4, 6, 8, 7]
    small = extended(torch.arange(3, dtype=torch.int32), torch.tensor([1 << 40]))  # would not fit the shared buffer
    assert small.tolist() == [0, 1, 2, 1 << 40]
    end = torch.arange(300)[290:]  # its buffer has more room, but not behind it
    assert extended(end, torch.tensor([7])).tolist() == [*range(290, 300), 7]


def test_positions_go_on_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        stored = extended(torch.arange(5), torch.tensor([5]))
    with torch.no_grad():
        stored = extended(stored, torch.tensor([6]))
    with torch.inference_mode():
        stored = extended(stored, torch.tensor([7]))
    assert extended(stored, torch.tensor([8])).tolist() == list(range(9))
