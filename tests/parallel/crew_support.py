"""Code that worker processes of tests run: without torch, so that they start at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError


def once(path: Path) -> bool:
    """True for the first process that asks, of all."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Server:
    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.facts = folder, {"number": number, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def answer(self, request: dict[str, Any]) -> Any:
        if request.get("wait_for"):
            while not (self.folder / request["wait_for"]).exists():
                time.sleep(0.005)
        if request.get("touch"):
            (self.folder / request["touch"]).touch()
        if (request.get("dies") == "once" and once(self.folder / "died")) or request.get("dies") == "always":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.get("raises") == "memory":
            raise MemoryError("tried to allocate 77 bytes")
        if request.get("raises") == "config":
            raise ConfigError("method.residual", 7, "must be even", hint="method.residual=8")
        if request.get("raises"):
            raise ZeroDivisionError("division by zero")
        print("a worker may print", file=sys.stderr)
        return {"said": request["say"], "pid": os.getpid()}


@contextmanager
def serve(argument: dict[str, Any], number: int) -> Iterator[Server]:
    if argument.get("fails") == "memory":
        raise MemoryError("tried to allocate 5 bytes")
    if argument.get("fails") == "dies":
        os._exit(3)
    yield Server(Path(argument["folder"]), number)
