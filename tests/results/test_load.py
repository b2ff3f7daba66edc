"""Load of the machine: shares from counters, and the warning about times that cannot be trusted."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvbench.results import load
from kvbench.results.load import Moment, between, busyness


def moment(**changes: float | None) -> Moment:
    return Moment(**({"at": 0.0, "average": 1.0, "busy": 0.0, "own": 0.0, "held_back": 0.0, "mhz": 3000.0} | changes))


def test_processors_are_shared_out_between_this_process_and_the_rest() -> None:
    computed = between(
        moment(at=5.0, own=2.0, busy=100.0), moment(at=15.0, own=12.0, busy=125.0, average=2.5, mhz=1500.0)
    )
    assert computed == {
        "cpus": os.cpu_count(),
        "average": [1.0, 2.5],
        "mhz": [3000.0, 1500.0],
        "own_cpus": 1.0,
        "other_cpus": 1.5,
        "held_back": 0.0,
    }
    assert between(moment(), moment(at=10.0, held_back=2.5))["held_back"] == 0.25
    assert between(moment(), moment(at=10.0, own=20.0, busy=5.0))["other_cpus"] == 0.0
    unknown = between(moment(busy=None, held_back=None), moment(at=1.0))
    assert unknown["other_cpus"] is unknown["held_back"] is None


@pytest.mark.parametrize(
    ("own", "others", "held", "busy"),
    [
        (2.0, 0.0, 0.0, False),
        (1.0, 1.0, 0.0, True),
        (0.3, 1.7, 0.0, True),
        (1.6, 0.3, 0.0, False),
        (0.5, 0.8, 0.0, False),
        (1.0, None, None, False),
        (1.0, None, 0.06, True),
        (1.0, 0.0, 0.05, False),
        (1.0, 0.0, 0.5, True),
    ],
)
def test_only_a_machine_that_is_full_with_other_work_is_busy(own, others, held, busy) -> None:
    message = busyness({"cpus": 2, "own_cpus": own, "other_cpus": others, "held_back": held})
    assert (message is not None) == busy
    if message and held:
        assert f"{held:.0%}" in message
    elif message:
        assert f"{others:.1f} of the machine's 2" in message


def test_jobs_that_run_side_by_side_are_named_as_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cpus": 2, "own_cpus": 1.0, "other_cpus": 0.9, "held_back": 0.0}
    assert "other programs" in busyness(found)
    monkeypatch.setenv(load.SIDE_BY_SIDE, "1")
    message = busyness(found)
    assert "other jobs of the sweep ran at the same time and used 0.9 of 2 processors" in message
    assert "other programs" not in message
    assert busyness({**found, "other_cpus": 0.1}) is None


def test_nothing_known_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert busyness(None) is busyness({}) is None
    monkeypatch.setattr(load, "_text_or_empty", lambda path: "")
    monkeypatch.setattr(os, "getloadavg", lambda: (_ for _ in ()).throw(OSError()))
    computed = Moment()
    assert computed.average is computed.busy is computed.held_back is computed.mhz is None


def test_counters_are_read_as_the_kernel_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/stat": "cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n",
        "/sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_throttled 3\nthrottled_usec 2500000\n",
        "/proc/cpuinfo": "cpu MHz\t\t: 2000.0\ncpu MHz\t\t: 3000.0\ncpu MHz : ?\n",
    }
    monkeypatch.setattr(load, "_text_or_empty", lambda path: files.get(str(path), ""))
    computed = Moment()
    assert computed.busy == (100 + 20 + 30 + 6 + 7 + 8) / os.sysconf("SC_CLK_TCK")
    assert computed.held_back == 2.5
    assert computed.mhz == 2500


def test_processor_time_is_the_users_and_the_systems_without_the_childrens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process that there is; names may have spaces and parentheses."""
    line = "7 (a) b) S 1 1 1 0 -1 4194560 100 200 300 400 30 12 5000 6000 20 0 1 0 99\n"
    monkeypatch.setattr(
        load, "_text_or_empty", lambda path: line if str(path) in ("/proc/7/stat", "/proc/8/stat") else ""
    )
    assert load.cpu_seconds([7, 9, 8]) == 2 * 42 / os.sysconf("SC_CLK_TCK")
    assert load.cpu_seconds([9]) == 0.0 == load.cpu_seconds([])


def at(seconds: float, **more: Any) -> load.Moment:
    return load.Moment(**{"at": seconds, "average": 0.5, "busy": 1.0, "own": 1.0, "held_back": 0.0, "mhz": 2e3, **more})


def test_the_load_between_two_moments_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    end = at(14.0, average=1.5, busy=13.0, own=3.0, held_back=1.0, mhz=1e3)
    told = load.between(at(10.0), end)
    rates = {"own_cpus": 0.5, "other_cpus": 2.5, "held_back": 0.25}
    assert told == {"cpus": 8, "average": [0.5, 1.5], "mhz": [2e3, 1e3], **rates}
    for name, lacking in (("busy", "other_cpus"), ("held_back", "held_back")):
        assert load.between(at(10.0, **{name: None}), end)[lacking] is None
        assert load.between(at(10.0), at(14.0, **{name: None}))[lacking] is None
    idle = load.between(at(10.0), at(14.0, own=9.0, held_back=-1.0))
    assert (idle["other_cpus"], idle["held_back"]) == (0.0, 0.0)
    assert load.between(at(10.0), at(11.0, held_back=5.0))["held_back"] == 1.0
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert load.between(at(10.0), at(10.0, own=1.002)) == {
        **{"cpus": 1, "average": [0.5, 0.5], "mhz": [2e3, 2e3]},
        **{"own_cpus": 2.0, "other_cpus": 0.0, "held_back": 0.0},
    }


@pytest.mark.parametrize(
    ("others", "own", "warned"),
    [(load.OTHERS * 10, 10.0, False), (load.OTHERS * 10 + 0.1, 10.0, True), (load.OTHERS * 10 + 0.1, 0.0, False),
     (load.FULL * 10 - 0.1, 0.1, True), (None, 10.0, False)],
)  # fmt: skip
def test_other_programs_matter_on_a_machine_that_is_full(others: float | None, own: float, warned: bool) -> None:
    told = load.busyness({"cpus": 10, "other_cpus": others, "own_cpus": own, "held_back": None})
    assert (told is not None) == warned


def test_a_limit_of_the_container_matters_beyond_its_bound() -> None:
    idle = {"cpus": 10, "other_cpus": 0.0, "own_cpus": 1.0}
    assert load.busyness({**idle, "held_back": load.HELD_BACK}) is None
    assert "CPU limit" in str(load.busyness({**idle, "held_back": load.HELD_BACK + 0.01}))
    assert load.busyness(None) is None and load.busyness({}) is None
