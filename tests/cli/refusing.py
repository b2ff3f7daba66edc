"""A process that runs one command line after another: what each says, composes and imports is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: packages from elsewhere that are imported while a command line is read and checked: no torch, nothing as large
LIGHT = {
    *("antlr4", "attr", "filelock", "huggingface_hub", "hydra", "hydra_plugins", "omegaconf", "packaging", "rich"),
    "yaml",
}

_CODE = """
import contextlib, io, json, os, sys
given = set(sys.modules)
import yaml
from kvbench.cli import compose
from kvbench.cli.main import main

count, really = [0], compose.compose
def counted(*arguments, **options):
    count[0] += 1
    return really(*arguments, **options)
compose.compose = counted
compose.CHECK_SECONDS = 1e9  # every job, on a loaded machine too
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # as in tests/conftest.py

for line in sys.stdin:
    folder, arguments = json.loads(line)
    os.chdir(folder)
    count[0], out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    new = {name.partition(".")[0] for name in set(sys.modules) - given} - sys.stdlib_module_names - {"kvbench"}
    new = sorted(name for name in new if "cython" not in name)
    started = "kvbench.runner.run" in sys.modules
    said = [status, out.getvalue(), err.getvalue(), count[0], new, started]
    print(json.dumps(said), file=sys.__stdout__, flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What came of a command line.

    Args:
        status: exit status.
        out: standard output.
        err: standard error.
        compositions: how often Hydra composed a configuration.
        imported: packages from elsewhere that the process has imported until now.
        started: True if a run was about to start.
    """

    status: int
    out: str
    err: str
    compositions: int
    imported: list[str]
    started: bool


class Refusing:
    """The process; see :func:`refusing`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, arguments: Sequence[str], folder: Path) -> Answer:
        """Run ``python -m kvbench`` with some arguments in a folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(folder), list(arguments)]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"{arguments} ended the process"
        return Answer(*json.loads(line))


@contextmanager
def refusing() -> Iterator[Refusing]:
    """Start the process, and end it after the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _CODE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield Refusing(process)
        assert process.stdin is not None
        process.stdin.close()
