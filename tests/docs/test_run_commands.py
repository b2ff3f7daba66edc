"""``make test-docs``: the commands in blocks of README.md and the documents run, in the order in which they stand.

They run in a copy of the tree, each once, with one sample of 1024 tokens per task where a run leaves that open. Words
that a reader replaces (RUN, ID, DIR) become what earlier commands have made.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, Command, all_commands

RUNNABLE = list(
    {command.text: command for command in all_commands() if not command.inline and command.needs is None}.values()
)
#: parts of commands that run nothing, or whose samples cannot be limited
UNLIMITED = ("dataset=efficiency", "--help", "--cfg")

pytestmark = pytest.mark.docs


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree's files that git knows or would add."""
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    run = [
        sys.executable,
        "-m",
        "kvbench",
        "--multirun",
        "method=fp16,kivi",
        "dataset=mini/key_value",
        "dataset.limit=1",
    ]
    subprocess.run(run, cwd=copy, check=True, capture_output=True, env=environment())  # what reports can show
    return copy


def environment() -> dict[str, str]:
    """The environment of a reader without network, whose Python is first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


def completed(text: str, tree: Path) -> str:
    """Return a command with everything that a reader would fill in."""
    runs = sorted(path.name for path in (tree / "results" / "runs").iterdir() if path.is_dir())
    sweeps = sorted(path.name for path in (tree / "results" / "sweeps").iterdir() if path.is_dir())
    text = text.replace("--pair A B", f"--pair {runs[0]} {runs[1]}").replace("RUN...", " ".join(runs[:2]))
    for run in runs[:2]:
        text = re.sub(r"\bRUN\b", run, text, count=1)
    text = re.sub(r"\bID\b", sweeps[0], text)
    text = re.sub(r"\bDIR\b", "made", text)
    words = shlex.split(text)
    module = next((word for word in words if word in ("kvbench", "kvbench.analysis")), None)
    if module and not any(part in word for word in words for part in UNLIMITED):
        data = next((word for word in words if word.startswith("dataset=")), "dataset=mini")
        fewer = "dataset.limit=1" + (" dataset.lengths=[1024]" if data.startswith("dataset=mini") else "")
        text = re.sub(r" dataset\.limit=\d+", "", text).replace(f" {module} ", f" {module} {fewer} ", 1)
    return text


@pytest.mark.parametrize("command", RUNNABLE, ids=str)
def test_the_command_runs(command: Command, tree: Path) -> None:
    text = completed(command.text, tree)
    done = subprocess.run(
        text,
        shell=True,
        cwd=tree,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_there_are_commands_to_run() -> None:
    assert len(RUNNABLE) > 25
