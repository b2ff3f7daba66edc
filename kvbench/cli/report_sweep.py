"""``python -m kvbench.report --sweep ID``, with ``--watch``: the jobs of a sweep as a table on the terminal."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from kvbench.page.sweep import FollowedSweep
from kvbench.results import ranking, sweeps, tables
from kvbench.results.sweeps import Progress, Sweep
from kvbench.util.table import printable

#: seconds between two looks at the files of the sweep
EVERY_S = 2.0
#: maximum number of lines about jobs that are not in the table
MOST = 20
#: moves the cursor of a terminal to its upper left corner and clears what is below
_CLEAR = "\x1b[H\x1b[J"


def show(sweep: Sweep, *, watch: bool = False) -> int:
    """Print the table of a sweep and a line per job that has not ended well; return 0 if all jobs are done, else 1.

    `watch` prints again whenever something has changed, until no process works on the sweep.
    """
    followed = FollowedSweep(sweep)
    seen = None
    with suppress(KeyboardInterrupt):
        while True:
            signature, driven = followed.signature(), sweep.driven()
            if signature != seen:
                seen = signature
                entries = followed.progress()
                if watch and sys.stdout.isatty():
                    print(_CLEAR, end="")
                print("\n".join(_text(sweep, entries, driven)), flush=True)
            if not watch or not (driven or any(entry.state == "running" for entry in followed.progress())):
                break
            time.sleep(EVERY_S)
    return 0 if all(entry.state == "done" for entry in followed.progress()) else 1


def _text(sweep: Sweep, entries: Sequence[Progress], driven: bool) -> list[str]:
    """Return the lines about a sweep: its table, its counts, and the jobs that are not done."""
    rows = ranking.best_first([entry.metrics for entry in entries if entry.metrics is not None])
    states = {"done": "done", "running": "running", "failed": "failed", "missing": "not started"}
    counts = {text: sum(entry.state == state for entry in entries) for state, text in states.items()}
    lines = [tables.summary(rows)] if rows else []
    lines.append(
        f"sweep {sweep.manifest.id}: {sweeps.in_words(len(entries))}, "
        + ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    )
    others = [entry for entry in entries if entry.state in ("running", "failed")]
    for entry in others[:MOST]:
        first = (entry.message.splitlines() or [""])[0]
        lines.append(
            printable(
                f"job {entry.job.number + 1} {states[entry.state]}: {entry.job.label}" + (f": {first}" if first else "")
            )
        )
    if len(others) > MOST:
        lines.append(
            f"and {len(others) - MOST} more; python -m kvbench.report --html --sweep {shlex.quote(sweep.name)} has all"
        )
    if not driven and any(entry.state in ("missing", "failed") for entry in entries):
        lines.append(f"to run what is missing: python -m kvbench --resume {shlex.quote(sweep.name)}")
    return lines
