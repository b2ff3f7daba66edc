"""Progress for people: a bar on a terminal, a few plain lines elsewhere (CI, a log file)."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import IO, Any


def interactive() -> bool:
    """Whether a person watches: standard error is a terminal and no CI service runs this."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def say(line: str) -> None:
    """One line for the user, on standard error (standard output is for tables); nobody who listens ends no run."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:  # `... 2>&1 | head` has seen enough
        silence(sys.stderr)


def show(text: str) -> None:
    """Text on standard output; where its reader has gone, as `head` does, nothing more is written there."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)


def silence(stream: IO[str]) -> None:
    """Send what is left in a stream's buffer, and all that follows, nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Progress:
    """Counts samples: ``with Progress("kivi int2", 100) as bar: bar.advance(1, "needle 0.97")``.

    Args:
        title: what is being done.
        total: number of samples.
        done: samples that are there already (a resumed run).
        every_s: seconds between plain lines where there is no terminal.
    """

    def __init__(self, title: str, total: int, done: int = 0, every_s: float = 20.0) -> None:
        self.title, self.total, self.done, self.every_s = title, total, done, every_s
        self._bar: Any = None
        self._task: Any = None
        self._started = self._said = time.monotonic()

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
            resumed = f", {self.done} already there" if self.done else ""
            say(f"{self.title}: {self.total} samples{resumed}")
        return self

    def advance(self, count: int, note: str = "") -> None:
        """`count` more samples are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, total=self.total, completed=self.done, note=note)
        elif time.monotonic() - self._said >= self.every_s and self.done < self.total:
            self._said = time.monotonic()
            say(f"{self.title}: {self.done}/{self.total}  {note}")

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            say(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            say(f"{self.title}: {self.done}/{self.total} in {time.monotonic() - self._started:.1f} s")
