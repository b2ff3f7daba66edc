"""The tables by which kernels rotate keys: as the model does, for as many positions as needed, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention.rope import rotation_tables as rope_tables
from kvbench.attention.rope.rotation_tables import FINE, NotServed, angles, rope_of, rotation_tables
from kvbench.methods import load_method
from tests import zoo

CPU = torch.device("cpu")


class Rotation:
    """RoPE on the halves of a head, whose calls are counted."""

    def __init__(self, frequencies: float = 100.0, interleaved: bool = False) -> None:
        self.base, self.interleaved, self.calls = frequencies, interleaved, 0

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        half = keys.shape[-1] // 2
        turned = positions[..., None].double() * self.base ** (-torch.arange(half).double() / half)
        cos, sin = turned.cos().float()[:, None], turned.sin().float()[:, None]
        one, two = (keys[..., ::2], keys[..., 1::2]) if self.interleaved else keys.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def test_angles_are_cosines_then_sines_in_fp32():
    found = angles(Rotation().rotate, torch.tensor([0, 3]), 4, CPU)
    wanted = torch.tensor([[0.0, 0.0], [3.0, 3.0 / 10]])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat([wanted.cos(), wanted.sin()], -1))


def test_tables_grow_by_half_of_what_is_needed_and_are_made_once():
    rotation = Rotation()
    fine, coarse = rotation_tables(rotation.rotate, 8, CPU, 3 * FINE)
    assert fine.shape == (FINE, 8) and coarse.shape == (4 + 2, 8)
    calls = rotation.calls
    assert rotation_tables(rotation.rotate, 8, CPU, 5 * FINE)[1] is coarse and rotation.calls == calls
    longer = rotation_tables(rotation.rotate, 8, CPU, 5 * FINE + 1)[1]
    assert len(longer) == 7 + 3 and torch.equal(longer[:6], coarse)
    assert rotation_tables(rotation.rotate, 16, CPU, 1)[0].shape == (FINE, 16)
    assert rotation_tables(rotation.rotate, 8, CPU, 1)[1] is longer
    torch.testing.assert_close(coarse, angles(rotation.rotate, FINE * torch.arange(6), 8, CPU))


def test_a_rotation_that_the_tables_do_not_reproduce_is_refused():
    with pytest.raises(NotServed, match="no kernel rotates them as this model does"):
        rotation_tables(Rotation(interleaved=True).rotate, 8, CPU, 10)
    growing = Rotation()
    growing.module = SimpleNamespace(rope_type="longrope")
    with pytest.raises(NotServed, match="change with the length"):
        rotation_tables(growing.rotate, 8, CPU, 10)

    def bent(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return Rotation().rotate(keys, positions.clamp(max=4 * FINE))  # other frequencies far away

    with pytest.raises(NotServed, match="no kernel rotates"):
        rotation_tables(bent, 8, CPU, 20 * FINE)


def layer(starts: list[int], ids: torch.Tensor) -> Any:
    made = zoo.new_layer(load_method("fp16"), starts)
    made.rope = Rotation().rotate
    made.progress.positions.see(ids, 0, starts)
    zoo.feed(made, *zoo.random_kv(ids.shape[1], len(starts), channels=8))
    return made


def test_rows_begin_at_the_position_of_their_first_slot():
    made = layer([0, 2], torch.tensor([[7, 8, 9, 10], [0, 0, 1, 2]]))
    found = rope_of(made, 300)
    assert found.starts.tolist() == [7, 1] and found.starts.dtype == torch.int32
    assert found.fine.shape == (FINE, 8) and len(found.coarse) * FINE >= 307
    assert rope_of(made, 300).starts is found.starts
    assert torch.equal(found.coarse, rope_tables.rotation_tables(made.rope, 8, CPU, 307)[1])


@pytest.mark.parametrize(
    ("starts", "ids"),
    [([0], [[0, 1, 5, 6]]), ([0, 0], [[0, 1, 2, 3], [4, 5, 5, 6]]), ([0], [[-1, 0, 1, 2]])],
)
def test_positions_that_jump_or_are_negative_are_refused(starts, ids):
    with pytest.raises(NotServed, match="positions are not consecutive"):
        rope_of(layer(starts, torch.tensor(ids)), 10)


def test_tokens_out_of_order_or_without_positions_are_refused():
    made = layer([0], torch.arange(4)[None])
    made.order[0] = torch.tensor([0, 2, 1, 3])
    made.method.positions = lambda held, row: held.order[row]
    with pytest.raises(NotServed, match="positions are not consecutive"):
        rope_of(made, 10)
    made = layer([0], torch.arange(4)[None])
    made.progress.positions.runs = []
    with pytest.raises(NotServed, match="positions are not consecutive"):
        rope_of(made, 10)
