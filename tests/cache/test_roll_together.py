"""Windows of all layers roll at once: every bit as the paper's statement has it, in a few launches for any model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.cache import KVCache
from kvbench.cache.kernels import roll_together
from kvbench.cache.kernels.roll_together import Move
from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo
from tests.cache.rolling_oracle import Watched


class Operations(TorchDispatchMode):
    """Counts what a device would do: no views, no empty tensors, nothing that gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, (list, tuple)) else made
        given = args[0].data_ptr() if args and isinstance(args[0], torch.Tensor) else None
        name = func.__name__.split(".")[0]
        # a slice begins elsewhere in the storage that it was given
        idle = name in ("slice", "select", "chunk", "empty") or (isinstance(first, torch.Tensor) and not first.numel())
        if name.endswith("_") or not (idle or (isinstance(first, torch.Tensor) and first.data_ptr() == given)):
            self.count[name] += 1
        return made


@pytest.mark.parametrize("together", [True, False], ids=["together", "layer by layer"])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([40], {"budget": 24}),
        ([9], {"budget": 24}),
        ([40, 21, 26, 26], {"budget": 24}),
        ([30, 25], {"budget": 24, "position": "original"}),
        ([30, 12], {"budget": 0.5, "sinks": 3}),
        ([30, 25], {"budget": 24, "sinks": 0}),
        ([30, 25], {"budget": 40, "sinks": 19, "dtype": torch.float32}),
    ],
    ids=["rolls", "begins to roll", "rows", "original", "share", "no sinks", "many sinks"],
)
@torch.inference_mode()
def test_windows_hold_sinks_turned_from_what_came_and_the_newest(lengths, options, together):
    """Several hundred steps: windows come to the end of their buffers several times, each row at its own step."""
    watched = Watched(lengths, together=together, **options)
    starts = set()
    for number in range(300):
        watched.step()
        starts.update(watched.cache.layers[0].stores()[0].tail.starts)
        if number % 7 == 0 or number < 30:
            watched.check()
    assert len(starts) > 20 and 0 in starts


@torch.inference_mode()
def test_copies_orders_and_rollbacks_in_the_middle():
    """Whatever a cache is put through between two steps."""
    watched = Watched([33, 21, 28], budget=24)
    for number in range(120):
        watched.step(1 + number % 4)
        if number % 4 == 3:
            watched.take_back([number % 3, 2, number // 4 % 4, 1][: len(watched.cache.progress.padding.starts)])
        if number in (11, 50):
            other = watched.twin()
            for _ in range(70):
                other.step()
            other.check()
        if number == 40:
            watched.select([2, 0, 0, 1])
        watched.check()


@torch.inference_mode()
def test_layers_that_do_not_agree_roll_each_in_its_own_way():
    """One has given back a token that the others hold, and one begins elsewhere in its buffer."""
    watched = Watched([30, 26], layers=4, budget=24)
    for _ in range(5):
        watched.step()
    watched.settle()
    for store in watched.cache.layers[2].stores():
        tail = store.tail
        live = tail.view(slice(0, 2)).clone()
        tail.starts[:] = [0, 0]
        tail.buffer[:, :, : live.shape[2]] = live
    for _ in range(120):
        watched.step()
        watched.check()


@torch.inference_mode()
def test_an_error_while_layers_settle_leaves_windows_as_the_host_counts_them(monkeypatch):
    """Deferred work is carried out even so."""
    watched = Watched([30], layers=3, budget=24)
    watched.step()
    monkeypatch.setattr(watched.cache.layers[1], "settle", lambda: 1 / 0)
    watched.cache.layers[1].stores()[0].tail.starts[0] += 1  # not the first layer's state
    with pytest.raises(ZeroDivisionError):
        watched.settle()
    watched.cache.layers, watched.given = watched.cache.layers[:1], watched.given[:1]
    assert watched.cache.progress.rolls.jobs is None
    watched.check()


@pytest.mark.parametrize("lengths", [[30], [30, 40, 33, 36]], ids=["a row", "rows"])
@torch.inference_mode()
def test_operations_of_a_step_do_not_grow_with_the_layers(lengths):
    """On a CPU; and fewer than twenty where all rows are alike."""
    counts = []
    for layers in (2, 7):
        watched = Watched(lengths, layers=layers, budget=24)
        for _ in range(6):
            watched.step()
        with Operations() as found:
            watched.settle()
        counts.append(found.count)
    assert counts[0] == counts[1]
    assert 0 < sum(counts[0].values()) < (20 if len(lengths) == 1 else 40)


@torch.inference_mode()
def test_reserved_bytes_are_those_of_buffers_and_of_the_keys_that_came():
    """No further buffers are allocated for rolling at once."""
    watched = Watched([40], layers=3, budget=24)
    reserved = watched.cache.bill().reserved.total
    for _ in range(100):
        watched.step()
    room, element = 24 + 64, 2
    assert watched.cache.bill().reserved.total == reserved == 3 * 2 * 16 * element * (2 * room + 4)


@torch.inference_mode()
def test_keys_of_many_layers_are_turned_some_layers_at_a_time(monkeypatch):
    """No more elements at once than are allowed, whatever the batch; the last ones are fewer."""
    sizes, turn = [], roll_together.turn

    def counted(segments, moves):
        sizes.append(len(segments))
        return turn(segments, moves)

    monkeypatch.setattr(roll_together, "turn", counted)
    watched = Watched([30, 28], layers=5, budget=24)
    monkeypatch.setattr(roll_together, "TURNED", 2 * 2 * 2 * 4 * 16 + 1)  # of two layers
    watched.step()
    sizes.clear()
    watched.check()
    assert sizes == [2, 2, 1]


def test_moves_of_a_segment_are_joined():
    """Of rows that roll one after the other; in their order."""
    one, two = Watched([30, 25], budget=24).cache.layers[0].stores()
    first, second = Move(0, 1, 5, 6, 7), Move(1, 2, 0, 1, 2)
    joined = roll_together.moves_by_segment([(one.tail, (first,)), (two.tail, (first,)), (one.tail, (second,))])
    assert [moves for _, moves in joined.values()] == [(first, second), (first,)]


@torch.inference_mode()
def test_no_layer_gives_back_what_has_rolled():
    """Those that repeat the moves of the first layer count as it does."""
    watched = Watched([30, 25], layers=3, budget=24)
    watched.step(2)
    watched.settle()
    assert [layer.firm for layer in watched.cache.layers] == [[32, 32]] * 3
    watched.step(2)
    assert [layer.firm for layer in watched.cache.layers] == [[32, 32]] * 3
    with pytest.raises(CacheError, match="only the newest 2"):
        watched.cache.take_back([3, 3])
    watched.take_back([2, 1])
    watched.check()


@torch.inference_mode()
def test_layers_of_other_windows_roll_each_in_its_own_way():
    """They are in the same state until the text is longer than the window."""

    def lengths(together: bool) -> list[list[int]]:
        cache = KVCache(load_method("streamingllm", budget=24, position="original"), 3, windows=[20, None, 20])
        counts = []
        for step in range(20):
            for layer in cache.layers:
                zoo.feed(layer, *zoo.random_kv(1 if step else 16, seed=step))
            if together:
                cache.settle_layers()
            for layer in cache.layers if not together else ():
                layer.settle()
            counts.append([layer.length(slice(0, 1)) for layer in cache.layers])
        return counts

    assert lengths(together=True) == lengths(together=False)
    assert lengths(together=True)[-1] == [23, 24, 23]


def test_sinks_are_turned_by_what_left_their_own_row():
    """By one number where it is the same in all rows, which needs one table of angles; else by one for each row."""
    asked = []

    def turned(x, by):
        asked.append((tuple(x.shape), by))
        return x

    one, two = (SimpleNamespace(originals=torch.zeros(4, 2, 3, 8), turn=turned) for _ in range(2))
    moves = [Move(0, 2, 5, 6, 7), Move(3, 4, 5, 6, 7)]
    roll_together.turn([one, two], moves)
    roll_together.turn([one], [moves[0], moves[1]._replace(evicted=9)])
    assert asked == [((4, 4, 3, 8), 7), ((4, 2, 3, 8), [7, 7, 0, 9])]


def test_rows_that_do_not_move_are_marked_in_the_table_of_moves():
    moves = (Move(1, 3, 7, 9, 12, 5), Move(3, 4, 2, 2, 8, 0))
    found = roll_together.places(moves, 5, torch.device("cpu"))
    assert found.dtype == torch.int32 and found.shape == (5, 4)
    still = [-1, -1, 0, 0]
    expected = [[move.old, move.new, move.new, move.back] for move in moves]
    assert found.tolist() == [still, expected[0], expected[0], expected[1], still]
    assert roll_together.places(moves, 5, torch.device("cpu")) is found


def test_warming_up_launches_for_no_rows_and_only_where_a_kernel_will_roll(monkeypatch):
    done = []
    monkeypatch.setattr(roll_together, "by_kernel", lambda *given: done.append(given))
    monkeypatch.setattr(roll_together, "turn", lambda segments, moves: ("turned", segments, moves))
    monkeypatch.setattr(roll_together, "INTERPRET", True)

    def segment(**changes):
        buffer = torch.zeros(1, 1, 1, 1).half()
        return SimpleNamespace(**{"sinks": 4, "buffer": buffer, "originals": None, **changes})

    for asleep in (segment(sinks=0), segment(buffer=torch.zeros(1, 1, 1, 1).double())):
        roll_together.warm_rolling(asleep)
    assert not done
    plain, turned = segment(), segment(originals=object())
    roll_together.warm_rolling(plain)
    roll_together.warm_rolling(turned)
    assert [given[0] for given in done] == [[plain], [turned]] and done[0][2] is None
    assert done[1][2] == ("turned", [turned], done[1][1])
    assert all(move.first == move.last for given in done for move in given[1])  # no rows
    assert all((move.back > 0) for given in done for move in given[1])  # both kernels
    monkeypatch.setattr(roll_together, "INTERPRET", False)
    monkeypatch.setattr(roll_together, "compiled", lambda device: False)
    roll_together.warm_rolling(plain)
    assert len(done) == 2
