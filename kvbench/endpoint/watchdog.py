"""The process between a run and its server: it ends the server when the run does, in whatever way that happens.

``python watchdog.py GRACE_S COMMAND...`` starts the command and reads its standard input, which the run holds open.
When that closes, because the run ends, fails or is killed, every process of the group gets SIGTERM, and after GRACE_S
seconds SIGKILL. The watchdog leads the group, so nothing that the server started in it remains. It imports nothing of
kvbench, to start at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

#: seconds between two looks at the server
POLL_S = 0.05


def main(grace_s: float, command: list[str]) -> int:
    """Run `command` until it ends or standard input closes, and return its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group, the watchdog included
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_sigterm)
    while server.poll() is None:
        if select.select([sys.stdin], [], [], POLL_S)[0]:  # nothing is ever written to it: it is closed
            _end_group(server, grace_s)
    return server.returncode


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_group(server: subprocess.Popen[bytes], grace_s: float) -> None:
    os.killpg(0, signal.SIGTERM)
    limit = time.monotonic() + grace_s
    while server.poll() is None and time.monotonic() < limit:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)  # also what the server left behind, and this process


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
