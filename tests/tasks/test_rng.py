"""The generator's own streams: the published SplitMix64, and every draw pinned."""

from __future__ import annotations

import pytest

from kvbench.tasks.mini.rng import Rng


def test_is_splitmix64():
    rng = Rng("x")
    rng._state = 1234567  # the reference implementation's outputs for this seed
    assert [rng.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_are_pinned():
    rng = Rng("pin", 1)
    items = list(range(8))
    rng.shuffle(items)
    drawn = [
        rng.below(100),
        rng.between(-3, 3),
        rng.choice("abcdef"),
        rng.sample(range(20), 4),
        rng.chance(0.5),
        rng.weighted({"a": 1, "b": 2}),
        items,
    ]
    assert drawn == PINNED


PINNED: list[object] = [21, -1, "a", [0, 3, 9, 10], False, "b", [7, 5, 3, 2, 0, 1, 4, 6]]


def test_labels_separate_streams():
    assert Rng("a", 1).bits() == Rng("a", 1).bits()
    assert len({Rng("a", 1).bits(), Rng("a", 2).bits(), Rng("a1").bits(), Rng("b", 1).bits()}) == 4


def test_ranges():
    rng = Rng("ranges")
    assert {rng.between(2, 4) for _ in range(200)} == {2, 3, 4}
    assert sorted(rng.sample(range(5), 5)) == [0, 1, 2, 3, 4]
    assert 400 < sum(rng.chance(0.25) for _ in range(2000)) < 600
    with pytest.raises(ValueError):
        rng.sample([1], 2)
