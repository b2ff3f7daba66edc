"""Rounds of a clock on the GPU, with a clock of its own: how many, their median and spread; reads of growing sizes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.bench import clock, kernel
from kvbench.bench.clock import Time


def stopwatch(monkeypatch: pytest.MonkeyPatch, times: Any) -> list[str]:
    """Let the GPU's events measure the given milliseconds; returns the list of what is done with them."""
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, end: object) -> float:
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    return events


def test_a_round_is_divided_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    events = stopwatch(monkeypatch, iter([7.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    time = clock.rounds(lambda: events.append("run"), 2, 0.0)
    assert events == ["run", "run", "synchronize"] + ["record", "run", "record", "wait"] * 7
    assert (time.us, time.p10, time.p90, time.rounds) == pytest.approx((2000.0, 800.0, 3200.0, 7))
    assert time.spread == pytest.approx(1.2) and math.isnan(Time(0.0, 0.0, 0.0, 1).spread)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 7), (0.0195, 20), (1e9, 400)])
def test_rounds_add_up_to_the_measuring_time(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int) -> None:
    stopwatch(monkeypatch, iter([1.0] * 500))
    assert clock.eager(lambda: None, seconds).rounds == rounds


@pytest.mark.parametrize(("count", "per_round"), [(1, 8), (3, 9), (8, 8), (10, 10)])
def test_a_graph_has_at_least_eight_calls(monkeypatch: pytest.MonkeyPatch, count: int, per_round: int) -> None:
    calls: list[int] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(-1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="replay"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(clock, "rounds", lambda run, per_round, seconds: (run, per_round, seconds))
    functions = [lambda i=i: calls.append(i) for i in range(count)]
    assert clock.replayed(functions, 0.5) == ("replay", per_round, 0.5)
    warm, captured = calls[: calls.index(-1)], calls[calls.index(-1) + 1 :]
    assert len(warm) == 3 and captured == [i % count for i in range(per_round)]


def test_reads_grow_as_long_as_memory_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    buffers: list[tuple[int, Any]] = []

    def zeros(count: int, dtype: torch.dtype, device: str) -> Any:
        buffers.append((count, dtype))
        return SimpleNamespace(device=device)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (96 * mib, 0))
    monkeypatch.setattr(clock.torch, "zeros", zeros)
    monkeypatch.setattr(clock, "fastest_reader", lambda device: ("triton", lambda x: None))
    monkeypatch.setattr(clock, "copies", lambda size: 2)
    timed: list[tuple[int, float]] = []

    def replayed(calls: list[Any], seconds: float) -> Time:
        timed.append((len(calls), seconds))
        return Time(10.0 * len(timed), 0.0, 0.0, 1)

    monkeypatch.setattr(clock, "replayed", replayed)
    reads = clock.measure_ceiling(0.3)
    assert reads.points == [(4 * mib, 10.0), (16 * mib, 20.0), (64 * mib, 30.0)]  # 64 MiB and half as much again fit
    assert buffers == [(size * mib // 4, torch.int32) for size in (4, 4, 16, 16, 64, 64)]
    assert timed == [(2, 0.3)] * 3 and reads.kernel == "triton"
    assert clock.SIZES == (4, 16, 64, 256, 1024, 4096)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (383 * mib, 0))
    assert [size for size, _ in clock.measure_ceiling().points] == [4 * mib, 16 * mib, 64 * mib]


def test_a_ceiling_as_plain_data() -> None:
    reads = clock.Ceiling([(2000, 1.0), (8000, 2.0)], "torch.sum")
    assert reads.as_dict() == {
        "GB_s": 4.0,
        "kernel": "torch.sum",
        "reads": [{"bytes": 2000, "us": 1.0, "GB_s": 2.0}, {"bytes": 8000, "us": 2.0, "GB_s": 4.0}],
    }
    assert [reads.floor(n) for n in (1999, 5000, 8000, 16000)] == [1.0, 1.5, 2.0, 4.0]


def test_the_fastest_back_end_that_ran_is_the_best() -> None:
    found = {"a": Time(5.0, 1.0, 9.0, 3), "b": Time(3.0, 2.0, 9.0, 3), "c": "no kernel"}
    assert kernel.best_baseline(found) == ("b", 3.0)
    assert kernel.best_baseline({"c": "no kernel"}) is None is kernel.best_baseline({})
