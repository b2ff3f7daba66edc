"""Worker processes that take requests from one list; the request of a worker that dies goes to another worker.

A worker is a fresh Python process, which can therefore have its own GPU and number of threads. It talks to its parent
over one socket. If that connection closes, each side knows that the other has ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.parallel.crew_worker import rebuilt

#: number of workers that may die in a row, and with the same request, before the whole work is given up
DEATHS = 3
#: seconds that a worker has to end by itself before it is killed
GRACE_S = 2.0


class WorkerDiedError(KvbenchError):
    """Error raised if worker processes die again and again."""


class _Worker:
    """A worker process as its parent sees it.

    Attributes:
        number: index of the worker in the crew; a process that replaces the worker gets the same number.
        ready: True once the worker has loaded what it needs.
        request: index of the request that it works on; None if it is idle.
    """

    def __init__(self, number: int, start: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.number, self.ready = number, False
        self.request: int | None = None
        own_end, worker_end = socket.socketpair()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvbench.parallel.crew_worker", str(worker_end.fileno())],
                env={**os.environ, **environment, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
            )
        self.connection = Connection(own_end.detach())
        with suppress(OSError):  # a worker that is dead already is noticed by the first look at its connection
            self.connection.send({**start, "path": sys.path, "number": number})

    def end(self) -> str:
        """End the process if it still runs, and return a phrase for messages that says how it ended."""
        self.connection.close()
        try:
            code = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"exit status {code}"
        with suppress(ValueError):
            return f"killed by signal {-code}, {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


class Crew:
    """Worker processes with one list of requests. Use it as a context manager, which ends the processes.

    Args:
        server: ``MODULE:FUNCTION`` that runs in each worker: a context manager that is called with `argument` and the
            worker's number, and yields an object with ``facts``, plain data that :meth:`outcomes` makes available, and
            a method ``answer(request)``.
        argument: plain data for `server`.
        environments: for each worker, environment variables that are added to those of this process. Their number is
            the largest number of workers; processes are started when there is something to do for them.

    Attributes:
        facts: by worker number, the ``facts`` of each worker that has become ready.
    """

    def __init__(self, server: str, argument: Any, environments: Sequence[Mapping[str, str]]) -> None:
        self._start = {"server": server, "argument": argument}
        self._environments = list(environments)
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._requests: dict[int, Any] = {}
        self._arrived: deque[tuple[int, Any]] = deque()
        self._deaths = 0
        self._tries: Counter[int] = Counter()
        self.facts: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.terminate()
        while self._workers:
            self._workers.pop().end()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def outcomes(self, requests: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Let the workers answer requests, in the order given, and yield the answers as they come.

        `requests` are plain data for the method ``answer`` of the workers.

        Yields:
            The index of a request, and the answer, or the exception that ``answer`` raised.

        Raises:
            WorkerDiedError: :data:`DEATHS` workers have died one after the other, or with the same request.
            Exception: a worker could not be set up; the exception has the name and message of the worker's.
        """
        self._waiting, self._requests = deque(enumerate(requests)), dict(enumerate(requests))
        self._tries.clear()
        while self._waiting or self._busy():
            self._hand_out()
            self._listen()
            while self._arrived:
                yield self._arrived[0]
                self._arrived.popleft()  # only now, so that an interruption loses no answer

    def stop(self) -> None:
        """Hand out no more requests; :meth:`outcomes` ends after the answers to those already handed out."""
        self._waiting.clear()

    def unseen(self) -> list[tuple[int, Any]]:
        """Return the answers that workers sent but :meth:`outcomes` did not yield because it was interrupted."""
        for worker in list(self._workers):
            with suppress(OSError, KvbenchError, EOFError):
                if worker.ready and worker.connection.poll():
                    self._receive(worker)
        return list(self._arrived)

    def _busy(self) -> bool:
        return any(worker.request is not None for worker in self._workers)

    def _hand_out(self) -> None:
        """Start the workers that are needed, and give each one that is ready the next request."""
        open_requests = len(self._waiting) + sum(worker.request is not None for worker in self._workers)
        numbers = {worker.number for worker in self._workers}
        for number, environment in enumerate(self._environments):
            if len(self._workers) < open_requests and number not in numbers:
                self._workers.append(_Worker(number, self._start, environment))
        for worker in self._workers:
            if worker.ready and worker.request is None and self._waiting:
                worker.request, request = self._waiting.popleft()
                with suppress(OSError):  # its end is noticed by :meth:`_listen`
                    worker.connection.send(request)

    def _listen(self) -> None:
        """Wait until at least one worker has sent something or has ended, and process that."""
        ready = wait([worker.connection for worker in self._workers])
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                self._receive(worker)
            except (EOFError, OSError):
                self._lost(worker)

    def _receive(self, worker: _Worker) -> None:
        kind, content = worker.connection.recv()
        if kind == "failed":
            raise rebuilt(content)
        if kind == "ready":
            worker.ready = True
            self.facts[worker.number] = content
            return
        self._deaths = 0
        if worker.request is not None:
            index, worker.request = worker.request, None
            self._arrived.append((index, rebuilt(content) if kind == "error" else content))

    def _lost(self, worker: _Worker) -> None:
        """Put a dead worker's request at the head of the list; raise WorkerDiedError after too many deaths."""
        self._workers.remove(worker)
        how = worker.end()
        self._deaths += 1
        tries = 0
        if worker.request is not None:
            self._tries[worker.request] += 1
            tries = self._tries[worker.request]
            self._waiting.appendleft((worker.request, self._requests[worker.request]))
        if max(self._deaths, tries) >= DEATHS:
            during = f"working on {self._requests[worker.request]}" if worker.request is not None else "loading"
            raise WorkerDiedError(
                f"{max(self._deaths, tries)} worker processes died, the last one while {during} ({how}).\n"
                "  hint: the system kills processes if memory runs out: try fewer workers (runtime.workers=1), and run "
                "the same command again; it runs only the missing samples"
            )
