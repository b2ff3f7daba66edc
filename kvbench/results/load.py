"""The load of the machine while a run is timed, read from /proc and /sys; unknown (None) on other systems."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: times are not trusted if at least FULL of all processors were busy, and more than OTHERS of them with other work
FULL, OTHERS = 0.85, 0.2
#: environment variable set in workers of a sweep with parallel jobs: the other work on the machine is the sweep's
SIDE_BY_SIDE = "KVBENCH_JOBS_SIDE_BY_SIDE"
#: share of the time for which a container may be throttled by its CPU limit before times are not trusted
HELD_BACK = 0.05


@dataclass(frozen=True)
class Moment:
    """A reading of the system's load counters; :func:`between` computes the load from two of them.

    Attributes:
        at: monotonic time in seconds.
        average: load average over the last minute.
        busy: CPU seconds of all processes since boot, summed over the processors.
        own: CPU seconds of this process, and of its worker processes if it has any.
        held_back: seconds in total for which this process's container was throttled by its CPU limit.
        mhz: mean clock frequency of the processors in MHz.
    """

    at: float = field(default_factory=time.monotonic)
    average: float | None = field(default_factory=lambda: _average())
    busy: float | None = field(default_factory=lambda: _busy())
    own: float = field(default_factory=time.process_time)
    held_back: float | None = field(default_factory=lambda: _held_back())
    mhz: float | None = field(default_factory=lambda: _mhz())


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time in seconds that processes have used so far, from /proc; a process that has ended adds 0."""
    ticks = 0.0
    for pid in pids:
        fields = _text_or_empty(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        ticks += sum(map(float, fields[11:13]))  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def between(start: Moment, end: Moment) -> dict[str, Any]:
    """Compute the machine's load between two readings, the content of :class:`kvbench.results.record_machine.Load`.

    Figures that the system does not report are None.
    """
    seconds = max(end.at - start.at, 1e-3)
    own = (end.own - start.own) / seconds
    busy = None if start.busy is None or end.busy is None else (end.busy - start.busy) / seconds
    share = None if start.held_back is None or end.held_back is None else (end.held_back - start.held_back) / seconds
    return {
        "cpus": os.cpu_count() or 1,
        "average": [start.average, end.average],
        "mhz": [start.mhz, end.mhz],
        "own_cpus": round(own, 2),
        "other_cpus": None if busy is None else round(max(busy - own, 0.0), 2),
        "held_back": None if share is None else round(min(max(share, 0.0), 1.0), 3),
    }


def busyness(load: Mapping[str, Any] | None) -> str | None:
    """Return a warning if other programs or a container's CPU limit made a run's times untrustworthy; else None.

    The result is also None if the load (:func:`between`) is unknown.
    """
    if not load or not load.get("cpus"):
        return None
    cpus, others = load["cpus"], load.get("other_cpus")
    if (load.get("held_back") or 0.0) > HELD_BACK:
        return (
            f"the container's CPU limit throttled the run for {load['held_back']:.0%} of the time, so"
            " TTFT and TPOT are too long"
        )
    if others is None or others <= OTHERS * cpus or others + load["own_cpus"] < FULL * cpus:
        return None
    if os.environ.get(SIDE_BY_SIDE):
        return (
            f"other jobs of the sweep ran at the same time and used {others:.1f} of {cpus} processors, so"
            " compare TTFT and TPOT only within the sweep"
        )
    return (
        f"other programs used {others:.1f} of the machine's {cpus} processors, so"
        " TTFT and TPOT may be much longer than on an idle machine"
    )


def _average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _busy() -> float | None:
    """Return the CPU time of all processes in seconds, from /proc/stat (user, nice, system, irq, softirq, steal)."""
    ticks = _numbers(Path("/proc/stat"), "cpu ")
    if len(ticks) < 7:
        return None
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def _held_back() -> float | None:
    """Return the throttled time in seconds, from the cpu.stat of cgroup v2; None without cgroup v2."""
    throttled = _numbers(Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec")
    return throttled[0] / 1e6 if throttled else None


def _mhz() -> float | None:
    clocks = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        clocks += [kilohertz / 1000 for kilohertz in _numbers(path, "")]
    if not clocks:
        text = _text_or_empty(Path("/proc/cpuinfo"))
        texts = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("cpu MHz")]
        clocks = [float(number) for number in texts if number.replace(".", "").isdigit()]
    return round(sum(clocks) / len(clocks)) if clocks else None


def _numbers(path: Path, beginning: str) -> list[float]:
    """Return the numbers after `beginning` in the first line of a file that begins with it."""
    for line in _text_or_empty(path).splitlines():
        if line.startswith(beginning):
            return [float(word) for word in line.removeprefix(beginning).split() if word.replace(".", "").isdigit()]
    return []


def _text_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
