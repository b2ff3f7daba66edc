"""The kernels that roll windows, in Triton's interpreter: the same bits as plain torch, in as many launches for any
number of layers."""

from __future__ import annotations

import os

import pytest
import torch

from tests.attention.interpreter import require

if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the GPU runs them in test_roll_gpu.py; TRITON_INTERPRET=1 runs this", allow_module_level=True)
require()

from kvbench.cache.kernels import exact_kernels, roll_together  # noqa: E402
from tests.cache.rolling_oracle import Watched  # noqa: E402


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    """Only here: other tests of this process shall not have their CPU caches interpreted."""
    monkeypatch.setattr(roll_together, "INTERPRET", True)


@pytest.fixture
def launches(monkeypatch):
    """Names of kernels in the order of their launches."""
    found = []

    class Counted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(exact_kernels, name)

        def __getitem__(self, grid):
            found.append(self.name)
            return self.kernel[grid]

    for name in ("write_sinks", "move_to_front"):
        monkeypatch.setattr(exact_kernels, name, Counted(name))
    return found


@pytest.mark.parametrize(
    ("lengths", "options", "together"),
    [
        ([40], {"budget": 24}, True),
        ([40], {"budget": 24, "heads": 1}, False),
        ([24, 21, 22], {"budget": 24, "heads": 1}, True),
        ([30], {"budget": 24, "position": "original", "heads": 1}, True),
        ([30], {"budget": 40, "sinks": 19, "dtype": torch.float32, "heads": 1}, True),
    ],
    ids=["rolls", "layer by layer", "rows", "original", "many sinks"],
)
@torch.inference_mode()
def test_windows_hold_what_they_must(lengths, options, together, launches):
    """Past the end of their buffers: several tokens a step at first, then one, as the rows come to their ends."""
    watched = Watched(lengths, together=together, **options)
    for number, count in enumerate([5] * 11 + [1] * 20):
        watched.step(count)
        if number % 3 == 0 or number > 10:
            watched.check()
    each = 1 if "position" in options else 2  # keys that are not turned move as values do
    assert launches.count("move_to_front") == (each * len(lengths) if together else 0)


@torch.inference_mode()
def test_launches_of_a_step_do_not_grow_with_the_layers(launches):
    """Two for keys and values; two more where the windows go back to the front of their buffers."""
    found = []
    for layers in (1, 3):
        watched = Watched([30], layers=layers, heads=1, budget=24)
        for count in [5] * 11 + [1] * 12:
            launches.clear()
            watched.step(count)
            found.append((layers, tuple(launches)))
    each = ("write_sinks",) * 2
    for layers in (1, 3):
        steps = [names for number, names in found if number == layers][1:]
        assert steps.count(each) == 21
        assert steps.count(("write_sinks", "move_to_front") * 2) == 1


@torch.inference_mode()
def test_tokens_that_overlap_their_new_place_move_part_by_part(monkeypatch):
    """A part is smaller than what moves, and than the distance by which it moves, or larger."""
    watched = Watched([30], layers=1, heads=1, budget=24)
    (tail, _) = (store.tail for store in watched.cache.layers[0].stores())
    for tokens in (2, 8, 64):
        monkeypatch.setattr(roll_together, "ELEMENTS", tokens * 16)
        for start in (1, 7, 40):
            x = torch.randn_like(tail.buffer)
            tail.buffer.copy_(x)
            roll_together.by_kernel([tail], (roll_together.Move(0, 1, start, start, 0, 30),), None)
            assert torch.equal(tail.buffer[:, :, :30], x[:, :, start : start + 30])
            assert torch.equal(tail.buffer[:, :, max(30, start) :], x[:, :, max(30, start) :])


@torch.inference_mode()
def test_warming_up_moves_nothing(launches):
    """Every kernel runs, over no rows."""
    watched = Watched([30, 25], layers=1, budget=24)
    watched.step()
    for store in watched.cache.layers[0].stores():
        before = store.tail.buffer.clone()
        launches.clear()
        roll_together.warm_rolling(store.tail)
        assert launches == ["write_sinks", "move_to_front"]
        assert torch.equal(store.tail.buffer.view(torch.int16), before.view(torch.int16))
    watched.check()
    launches.clear()
    roll_together.warm_rolling(Watched([30], layers=1, budget=24, sinks=0).cache.layers[0].stores()[0].tail)
    assert launches == []  # without sinks, no kernel is needed
