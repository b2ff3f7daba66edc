"""Access to results for jobs on other machines: reading of a run's files, and writing of what its job sends."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from kvbench.errors import KvbenchError
from kvbench.results import samples
from kvbench.results.samples import DiskError
from kvbench.results.store import RunStore
from kvbench.util.progress import say

#: files of a run that are not sent to jobs
PRIVATE = (".lock", ".holder")
#: seconds between two attempts to lock a run that another process has
PAUSE_S = 0.5

#: an answer of the keeper: ``error`` holds the number, text and file of an OSError, ``refused`` the text of a message
Answer = dict[str, Any]


class Keeper:
    """Access to the files of a results folder, for jobs on other machines that lock and write one run at a time.

    Answers are plain data, so that the calls can go through any transport. Every call names a claim, a text that is
    unique to one attempt of a job. After an attempt counts as lost, its claim is withdrawn and can write nothing more.
    Relative paths of runs refer to `directory`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._claims: dict[Path, tuple[str, ExitStack]] = {}
        self._withdrawn: set[str] = set()

    def begin(self, claim: str, folder: str) -> Answer:
        """Lock a run for a claim, and return its files by name as ``files``; ``busy`` if another process has it."""
        path = self._directory / folder
        if claim in self._withdrawn:
            return {"refused": f"the claim of {claim} on {path} was withdrawn"}
        if path in self._claims:
            return {"busy": f"{self._claims[path][0]}"}
        stack = ExitStack()
        try:
            stack.enter_context(RunStore(path.parent, path.name, here=True).hold(timeout_s=0, quiet=True))
        except DiskError as error:
            return _failed(error)
        except KvbenchError:
            return {"busy": "another process"}
        self._claims[path] = (claim, stack)
        try:
            files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name not in PRIVATE]
            return {"files": {file.name: file.read_bytes() for file in files}}
        except OSError as error:
            self.end(claim, folder)
            return _failed(error)

    def append(self, claim: str, folder: str, data: bytes) -> Answer:
        """Append rows to a run's `samples.jsonl`."""
        path = self._directory / folder
        return self._refusal(claim, path) or _tried(lambda: samples.append_bytes(path / "samples.jsonl", data))

    def write(self, claim: str, folder: str, name: str, data: bytes) -> Answer:
        """Replace a file of a run."""
        path = self._directory / folder
        return self._refusal(claim, path) or _tried(lambda: samples.write_atomically(path / Path(name).name, data))

    def end(self, claim: str, folder: str) -> Answer:
        """Unlock a run."""
        path = self._directory / folder
        if self._claims.get(path, ("", None))[0] == claim:
            self._claims.pop(path)[1].close()
        return {}

    def withdraw(self, claim: str) -> Answer:
        """Unlock the runs of an attempt that counts as lost, and refuse all its later calls."""
        self._withdrawn.add(claim)
        for path in [path for path, (holder, _) in self._claims.items() if holder == claim]:
            self._claims.pop(path)[1].close()
        return {}

    def _refusal(self, claim: str, path: Path) -> Answer:
        if self._claims.get(path, ("", None))[0] == claim:
            return {}
        return {"refused": f"{claim} does not hold {path}"}


class Calls(Protocol):
    """Protocol of an object on another machine that passes calls on to a :class:`Keeper`."""

    def __call__(self, name: str, *arguments: Any) -> Answer:
        """Call a method of the keeper by its name, and return its answer."""


class KeptMirror:
    """A mirror (:class:`kvbench.results.mirror.Mirror`) that calls a keeper with the claim of this attempt of the job.

    `scratch` is a folder of this machine for the runs of the job.
    """

    def __init__(self, calls: Calls, claim: str, scratch: Path) -> None:
        self._calls, self._claim, self.scratch = calls, claim, scratch

    def begin(self, folder: Path) -> dict[str, bytes]:
        """See :meth:`kvbench.results.mirror.Mirror.begin`."""
        answer = self._calls("begin", self._claim, str(folder))
        if "busy" in answer:
            say(f"{answer['busy']} is working on run {folder.name}; waiting for it to end")
        while "busy" in answer:
            time.sleep(PAUSE_S)
            answer = self._calls("begin", self._claim, str(folder))
        files: dict[str, bytes] = self._checked(answer)["files"]
        return files

    def append(self, folder: Path, data: bytes) -> None:
        """See :meth:`kvbench.results.mirror.Mirror.append`."""
        self._checked(self._calls("append", self._claim, str(folder), data))

    def write(self, folder: Path, name: str, data: bytes) -> None:
        """See :meth:`kvbench.results.mirror.Mirror.write`."""
        self._checked(self._calls("write", self._claim, str(folder), name, data))

    def end(self, folder: Path) -> None:
        """See :meth:`kvbench.results.mirror.Mirror.end`."""
        with suppress(Exception):  # the keeper unlocks the run itself once this attempt counts as ended
            self._calls("end", self._claim, str(folder))
        shutil.rmtree(self.scratch / folder.name, ignore_errors=True)

    def _checked(self, answer: Answer) -> Answer:
        if "error" in answer:
            raise OSError(*answer["error"])
        if "refused" in answer:
            raise KvbenchError(f"{answer['refused']}.\n  hint: the job counts as lost, and was started again elsewhere")
        return answer


def _tried(act: Any) -> Answer:
    try:
        act()
    except DiskError as error:
        return _failed(error)
    return {}


def _failed(error: OSError | DiskError) -> Answer:
    """Return an error of reading or writing as plain data."""
    cause = error.__cause__ if isinstance(error, DiskError) else error
    if isinstance(cause, OSError):
        return {"error": (cause.errno or errno.EIO, cause.strerror or str(cause), str(cause.filename or ""))}
    return {"error": (errno.EIO, os.strerror(errno.EIO), "")}
