"""The life of a server that kvbench starts: command, health, log, and its end with all its processes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from kvbench.errors import ConfigError, KvbenchError
from kvbench.util.progress import say

#: environment variable with the key of a server, which no file, log or message contains
KEY = "KVBENCH_API_KEY"
#: seconds that a server has to end by itself before it is killed
GRACE_S = 10.0
#: seconds between two looks at a server that loads its model
POLL_S = 0.2
#: last bytes of a log in which the reason of a failure is looked for
TAIL = 20_000


class EndpointError(KvbenchError):
    """A server that cannot be reached, started or used, or answers what it must not."""


def free_port(wanted: int | None) -> int:
    """Return `wanted`, or a free TCP port if it is None.

    Raises:
        ConfigError: the wanted port is in use, or not allowed.
    """
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ConfigError(
                "model.port", wanted, f"cannot be used: {error.strerror}", hint="model.port=null chooses a free one"
            ) from error
        return int(place.getsockname()[1])


class Server:
    """A server process. Use it as a context manager, which ends the server and all processes that it started.

    The server and its descendants form a process group whose leader (:mod:`kvbench.endpoint.watchdog`) ends them if
    this process disappears.

    Args:
        command: program and flags.
        url: its address once it is healthy.
        log: file to which its output is appended, after a line with the command.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path, *, grace_s: float = GRACE_S) -> None:
        self.command, self.url, self.log, self._grace_s = list(command), url, log, grace_s

    def __enter__(self) -> Server:
        if shutil.which(self.command[0]) is None:
            raise EndpointError(
                f"{self.command[0]}: there is no such program, so no server was started.\n"
                "  hint: install the engine, or set model.binary=PROGRAM"
            )
        environment = {name: value for name, value in os.environ.items() if name != KEY}
        watchdog = Path(__file__).with_name("watchdog.py")
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._began = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(watchdog), str(self._grace_s), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(self._grace_s + 5)
        except BaseException:  # a second Ctrl-C too
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise
        finally:
            with suppress(OSError):  # what a server that ended by itself has left behind
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def pids(self) -> list[int]:
        """Process ids of the server, of what it started, and of its watchdog; empty if they are not known."""
        try:
            every = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:
            return []
        return [pid for pid in every if _group_of(pid) == self._process.pid]

    def text(self) -> str:
        """Return what the server has written since it was started."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            return log.read().decode(errors="replace")

    def check_running(self) -> None:
        """Raise EndpointError, with the last line of its log, if the server has ended."""
        status = self._process.poll()
        if status is None:
            return
        raise EndpointError(
            f"the server ended with status {status}: {self._reason()}\n"
            f"  hint: {self.log} has its output; the same command starts it again"
        )

    def await_health(self, path: str, limit_s: float) -> None:
        """Wait until the server answers `path` with status 200.

        Raises:
            EndpointError: the server has ended, or is not healthy after `limit_s` seconds.
        """
        began = time.monotonic()
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while time.monotonic() - began < limit_s:
                self.check_running()
                with suppress(httpx.HTTPError):
                    if client.get(f"{self.url}{path}").status_code == 200:
                        say(f"{Path(self.command[0]).name}: ready after {time.monotonic() - began:.0f} s ({self.log})")
                        return
                time.sleep(POLL_S)
        raise EndpointError(
            f"the server was not ready after {limit_s:.0f} s: {self._reason()}\n"
            f"  hint: raise model.start_s, or look into {self.log}"
        )

    def _reason(self) -> str:
        """Return the last line of the log that speaks of an error, or else its last line."""
        lines = [line.strip() for line in self.text()[-TAIL:].splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
        return (errors or lines or ["it wrote nothing"])[-1][:300]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None
