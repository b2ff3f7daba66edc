"""The load of the machine while a run is timed, read from /proc and /sys; None on systems without them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: shares of the processors: as busy as this, with so much of it other work, times are not to be trusted
FULL, OTHERS = 0.85, 0.2
#: set for the workers of a sweep whose jobs run side by side: what is busy beside one of them are the others
SIDE_BY_SIDE = "KVBENCH_JOBS_SIDE_BY_SIDE"
#: share of a session that a container may be held back by its limit of processor time
HELD_BACK = 0.05


@dataclass(frozen=True)
class Moment:
    """The system's counters at one moment.

    Attributes:
        at: seconds of a clock that only goes forward.
        average: processes that ran or waited, over the last minute.
        busy: seconds of processor time that all processes have taken, over all processors.
        own: seconds that this process has taken.
        held_back: seconds that this container's limit has held its processes back.
        mhz: clock of the processors, their mean.
    """

    at: float = field(default_factory=time.monotonic)
    average: float | None = field(default_factory=lambda: _average())
    busy: float | None = field(default_factory=lambda: _busy())
    own: float = field(default_factory=time.process_time)
    held_back: float | None = field(default_factory=lambda: _held_back())
    mhz: float | None = field(default_factory=lambda: _mhz())


def between(start: Moment, end: Moment) -> dict[str, Any]:
    """Return the content of ``load`` in `env.json`.

    Returns:
        ``cpus``; ``average`` and ``mhz`` as ``[start, end]``; mean numbers of processors that were busy: ``own_cpus``
        with this process, ``other_cpus`` with everything else; ``held_back``: the share of the time in which the
        container's limit held it back. None where the system does not say.
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
    """Return a warning if the machine was too busy for its times to be compared; else, or if unknown, None.

    Args:
        load: of :func:`between`.
    """
    if not load or not load.get("cpus"):
        return None
    cpus, others = load["cpus"], load.get("other_cpus")
    if (load.get("held_back") or 0.0) > HELD_BACK:
        return (
            f"the container's limit of processor time held it back for {load['held_back']:.0%} of the time:"
            " TTFT and TPOT are longer than without"
        )
    if others is None or others <= OTHERS * cpus or others + load["own_cpus"] < FULL * cpus:
        return None
    if os.environ.get(SIDE_BY_SIDE):
        return (
            f"timed beside other jobs of the sweep ({others:.1f} of {cpus} processors were theirs):"
            " compare TTFT and TPOT within the sweep alone"
        )
    return (
        f"the machine was busy with other work ({others:.1f} of its {cpus} processors):"
        " TTFT and TPOT may be much longer than on an idle one"
    )


def _average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _busy() -> float | None:
    """Read the ticks of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (man 5 proc)."""
    ticks = _numbers(Path("/proc/stat"), "cpu ")
    if len(ticks) < 7:
        return None
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def _held_back() -> float | None:
    """Read the throttled time of a control group of version 2, which counts microseconds."""
    throttled = _numbers(Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec")
    return throttled[0] / 1e6 if throttled else None


def _mhz() -> float | None:
    clocks = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        clocks += [kilohertz / 1000 for kilohertz in _numbers(path, "")]
    if not clocks:
        text = _text(Path("/proc/cpuinfo"))
        texts = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("cpu MHz")]
        clocks = [float(number) for number in texts if number.replace(".", "").isdigit()]
    return round(sum(clocks) / len(clocks)) if clocks else None


def _numbers(path: Path, beginning: str) -> list[float]:
    """Return the numbers of the first line that begins with `beginning`."""
    for line in _text(path).splitlines():
        if line.startswith(beginning):
            return [float(word) for word in line.removeprefix(beginning).split() if word.replace(".", "").isdigit()]
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
