"""``python -m kvbench.parallel.crew_worker FD``: a process of a :class:`kvbench.parallel.crew.Crew`."""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from kvbench.parallel.remote_errors import described


def main(descriptor: int) -> None:
    """Set the server up, answer requests until the parent closes the connection, and end.

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
                    answer = ("error", described(error))
                connection.send(answer)
    except Exception as error:
        connection.send(("failed", described(error)))


def _listen(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Receive requests (in a thread of its own), and end this process at once if the parent has ended."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
