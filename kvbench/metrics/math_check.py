"""Comparison of mathematical answers by math-verify, in a process of its own that is bounded in time and memory.

Computer algebra can run for hours on a short text (``10^{10^{10}}``), and math-verify's own limit needs signals, which
only a main thread gets. The process serves all answers of a run; one that exceeds the limit is ended with it, and the
next answer starts another.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvbench.errors import KvbenchError

#: seconds for an answer, and for the start of the process, which imports sympy
LIMIT_S, START_S = 10.0, 120.0
#: seconds beyond the limit of an answer after which the process ends by itself, if nobody has ended it
ORPHANED_S = 5.0
#: bytes of address space that the process may use
MEMORY = 4 << 30
#: characters of an answer that are compared, from its end; the extraction's patterns are slow on longer texts
LONGEST = 20_000


class MathProcess:
    """A process that compares mathematical answers; used by one thread at a time."""

    def __init__(self) -> None:
        package = Path(__file__).parents[2]
        path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the run, which may still score what it has
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self.end)
        if self._line(START_S) != "ready":
            self.end()
            raise KvbenchError(
                "the process that runs math-verify does not start\n"
                "  hint: python -c 'import math_verify' shows why; pip install 'kvbench[math]' installs what it needs"
            )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def _line(self, limit: float) -> str | None:
        """Return the next line of output, empty at its end; None if there is none within `limit` seconds."""
        try:
            return self._lines.get(timeout=limit)
        except queue.Empty:
            return None

    def compare(self, gold: str, prediction: str, limit: float) -> str:
        """Return ``right``, ``wrong``, ``failed``, or ``timeout``; after the last one the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, prediction, limit]) + "\n")
            self._process.stdin.flush()
            line = self._line(limit)
        except (OSError, ValueError):  # its end of the pipe is closed
            line = ""
        if line in ("right", "wrong", "failed"):
            return line
        self.end()
        return "timeout" if line is None else "failed"

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process, and close its pipes."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # what it did not read is lost on purpose
                self._process.stdin.close()


_lock = threading.Lock()
_running: MathProcess | None = None


def math_verdict(gold: str, prediction: str, limit: float = LIMIT_S) -> str:
    """Compare an answer with the reference answer, which is LaTeX without dollar signs.

    Returns:
        ``right`` or ``wrong``; ``timeout`` if math-verify took more than `limit` seconds; ``failed`` if it ended with
        an error or ran out of memory, or if the reference answer has no mathematical meaning for it.
    """
    global _running
    with _lock:
        if _running is None or _running.ended:
            _running = MathProcess()
        return _running.compare(gold, prediction[-LONGEST:], limit)


def math_versions() -> dict[str, str]:
    """Return the versions of the packages on which verdicts depend; ``missing`` for one that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    named = {}
    for package in ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy"):
        try:
            named[package] = version(package)
        except PackageNotFoundError:
            named[package] = "missing"
    return named


def _compare(gold: str, prediction: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    reading: Any = (LatexExtractionConfig(), ExprExtractionConfig())
    # without dollar signs LaTeX is read in part or not at all: \left( 3, 4 \right) would be 3
    wanted = parse(f"${gold}$", extraction_config=reading, parsing_timeout=None)
    if not wanted:
        raise ValueError("the reference answer cannot be read")
    given = parse(prediction, extraction_config=reading, parsing_timeout=None)
    return bool(verify(wanted, given, timeout_seconds=None))


def _answer_requests(requests: IO[str], replies: IO[str]) -> None:
    """Answer requests, one a line, until there are no more."""
    import math_verify  # noqa: F401  (imported before the first request, whose time is limited)

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not on this system
        pass
    print("ready", file=replies, flush=True)
    for line in requests:
        gold, prediction, limit = json.loads(line)
        _end_after(limit + ORPHANED_S)
        try:
            reply = "right" if _compare(gold, prediction) else "wrong"
        except Exception:
            reply = "failed"
        _end_after(0)
        print(reply, file=replies, flush=True)


def _end_after(seconds: float) -> None:
    """Let the system end this process after some seconds, since a run that was killed does not; 0: no longer."""
    if hasattr(signal, "setitimer"):  # not on Windows; the signal's default action needs no turn of the interpreter
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    _answer_requests(sys.stdin, replies)
