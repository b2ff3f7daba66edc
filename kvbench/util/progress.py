"""Progress: a bar on a terminal, a few plain lines elsewhere (CI, a log file)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any

from kvbench.util.table import printable

_plain = 0


def interactive() -> bool:
    """Return True if a progress bar can be drawn: standard error is a terminal, and the variable ``CI`` is not set."""
    return sys.stderr.isatty() and not os.environ.get("CI") and not _plain


@contextmanager
def lines_instead_of_bars() -> Iterator[None]:
    """Print lines instead of bars inside a ``with`` block, because only one bar at a time can be drawn."""
    global _plain
    _plain += 1
    try:
        yield
    finally:
        _plain -= 1


def say(line: str) -> None:
    """Print a message to standard error, escaping control characters except line breaks; ignore a closed pipe."""
    try:
        print(printable(line, keep="\n\t"), file=sys.stderr, flush=True)
    except BrokenPipeError:  # for example `... 2>&1 | head`
        silence(sys.stderr)


def show(text: str) -> None:
    """Print a result to standard output; once its reader has closed the pipe, as `head` does, discard the rest."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)


def silence(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that its buffered and all later output is discarded without an error."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


#: seconds after which the first line with an estimate of the remaining time is printed, if there is no terminal
FIRST_S = 3.0


def duration(seconds: float) -> str:
    """Format a number of seconds for reading, rounded, in s, min or h, for example ``12 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """Progress of a run over its samples: a bar on a terminal, and a line from time to time elsewhere.

    Use it as ``with Progress("kivi int2", 100) as bar: bar.advance(1, "needle 0.97")``.

    Args:
        total: number of samples, including those that were already done.
        done: number of samples that an earlier run has finished.
        every_s: shortest time in seconds between two printed lines, without a terminal.
    """

    def __init__(self, title: str, total: int, done: int = 0, every_s: float = 20.0) -> None:
        self.title, self.total, self.done, self.every_s = title, total, done, every_s
        self._bar: Any = None
        self._task: Any = None
        self._started = self._said = time.monotonic()
        self._said_within, self._under_way = False, ""
        # moment and samples from which the rest is estimated: the first pass, then the first batch, warm up
        self._since: tuple[float, float] | None = None
        self._batches = 0

    def __enter__(self) -> Progress:
        if interactive():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("[dim]{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, note="")
        else:
            resumed = f", {self.done} of them already done" if self.done else ""
            say(f"{self.title}: {self.total} samples{resumed}")
        return self

    def advance(self, count: int, note: str = "") -> None:
        """Count `count` more samples as finished, and show `note` behind the bar or in the next printed line."""
        self.done += count
        self._under_way = ""
        self._batches += 1
        if self._batches == 1:
            self._since = (time.monotonic(), self.done)
        if self._bar is not None:
            self._bar.update(self._task, total=self.total, completed=self.done, note=note)
        elif time.monotonic() - self._said >= self.every_s and self.done < self.total:
            self._said = time.monotonic()
            say(f"{self.title}: {self.done}/{self.total}  {note}")

    def within(self, share: float, note: str) -> None:
        """Show the progress of the current batch, without counting its samples as finished.

        `share` is the finished part of the batch in samples, for example 1.5; the note describes the current stage.
        """
        self._under_way = note
        if self._bar is not None:
            self._bar.update(self._task, total=self.total, completed=self.done + share, note=note)
            return
        now, at = time.monotonic(), self.done + share
        if self._since is None and share:
            self._since = (now, at)
        if now - self._said < (self.every_s if self._said_within else FIRST_S):
            return
        self._said, self._said_within = now, True
        begin, first = self._since or (now, at)
        left = f", about {duration((now - begin) * (self.total - at) / (at - first))} left" if at > first else ""
        say(f"{self.title}: {self.done}/{self.total}  {note}{left}")

    def say(self, line: str) -> None:
        """Print a message to standard error, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            say(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._under_way:
            self.say(f"{self.title}: stopped at {self._under_way}; the next run repeats unfinished samples")
        if self._bar is not None:
            self._bar.stop()
        else:
            say(f"{self.title}: {self.done}/{self.total} in {time.monotonic() - self._started:.1f} s")
