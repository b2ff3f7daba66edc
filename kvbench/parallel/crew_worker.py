"""``python -m kvbench.parallel.crew_worker FD``: runs one worker process of a crew, and sends exceptions as data."""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.util.failures import is_out_of_memory


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker process, as the cause of the exception that its parent raises."""


def error_as_data(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data, from which :func:`rebuilt` makes an exception of the same name and message."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "oom": is_out_of_memory(error),
        "exit_code": error.exit_code if isinstance(error, KvbenchError) else None,
    }


def rebuilt(failure: dict[str, Any]) -> Exception:
    """Return an exception for this process from the description of a worker's (:func:`error_as_data`).

    Its class has the same name. It is derived from KvbenchError, from MemoryError, or from both if the original was
    such an error, so that it is shown, recorded and handled like an exception of this process.
    """
    bases: list[type[Exception]] = []
    if failure["exit_code"] is not None:
        bases.append(KvbenchError)
    if failure["oom"]:
        bases.append(MemoryError)
    attributes = {} if failure["exit_code"] is None else {"exit_code": failure["exit_code"]}
    error: Exception = type(failure["kind"], tuple(bases) or (RuntimeError,), attributes)(failure["message"])
    error.__cause__ = WorkerTraceback("in a worker process:\n" + failure["traceback"])
    return error


def main(descriptor: int) -> None:
    """Enter the server's context, and answer requests until the parent closes the connection.

    `descriptor` is the file descriptor of this process's end of the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends its workers
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start = connection.recv()
    sys.path[:] = start["path"]
    if start["number"] > 0:  # one worker is enough to say what all of them would say
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    threading.Thread(target=_listen, args=(connection, requests), name="kvbench-parent", daemon=True).start()
    module, _, name = start["server"].partition(":")
    try:
        server = getattr(importlib.import_module(module), name)(start["argument"], start["number"])
        with server as served:
            connection.send(("ready", served.facts))
            while True:
                request = requests.get()
                try:
                    answer = ("answer", served.answer(request))
                except Exception as error:
                    answer = ("error", error_as_data(error))
                connection.send(answer)
    except Exception as error:
        connection.send(("failed", error_as_data(error)))


def _listen(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Receive requests (in a thread of its own), and end this process at once if the parent has ended."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
