"""Sweeps in other processes for tests: started, watched from outside, and disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbench.results import samples
from kvbench.results.samples import outputs

ROOT = Path(__file__).parents[2]
#: 24 jobs on the bundled model, with 2 samples of 512 tokens each
JOBS = 24
GRID = ["method=kivi", "quantizer=int2,int4", "method.residual=32,64,96", "method.sinks=0,4,8,16"]
GRID += ["dataset.tasks=[repeat]", "dataset.lengths=[512]", "dataset.limit=2", "decoding.max_new_tokens=4"]
#: options of the launchers with two workers
LAUNCHERS = {
    "joblib": ["launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_local": ["launcher=submitit_local", f"hydra.launcher.cpus_per_task={max(1, (os.cpu_count() or 1) // 2)}"],
    "ray": ["launcher=ray", "hydra.launcher.n_jobs=2", "hydra.launcher.shared_folder=false"],
}
#: part of the command line of a process that runs a job, by launcher
WORKERS = {"joblib": "loky", "submitit_local": "submitit.core._submit", "ray": "ray::_execute"}

#: executed when Python starts: the sixth write to a samples.jsonl, in whichever process, fails as on a full disk
FULL = """
import errno, os
real = os.write
def write(descriptor, data):
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        path = ""
    if path.endswith("samples.jsonl"):
        for number in range(1, 7):
            try:
                os.close(os.open(f"{FOLDER}/write-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if number == 6:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            break
    return real(descriptor, data)
os.write = write
"""


class Command:
    """A sweep that runs as a command of its own.

    Args:
        folder: working folder.
        arguments: arguments after ``python -m kvbench --multirun``.
    """

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        paths = [str(folder / "injected"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        with self.output.open("w") as handle:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvbench", "--multirun", *arguments],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        """Wait until a condition holds; the command must still run by then."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text()
            if time.monotonic() > end:
                raise TimeoutError(self.text())
            time.sleep(0.05)

    def ended(self, seconds: float = 900) -> int:
        return self.process.wait(seconds)


def inject(folder: Path) -> None:
    """Let one write of rows fail in the commands that run in a folder."""
    (folder / "injected").mkdir(parents=True)
    (folder / "injected" / "sitecustomize.py").write_text(FULL.replace("{FOLDER}", str(folder / "injected")))


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Processes that a process has started, directly or not, with their command lines."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        above = process
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and process != pid:
            try:
                yield process, (Path("/proc") / str(process) / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


def workers(pid: int, launcher: str) -> list[int]:
    """Processes that run jobs."""
    return [
        process for process, line in descendants(pid) if WORKERS[launcher] in line and "resource_tracker" not in line
    ]


def lines(folder: Path) -> int:
    """Number of rows on disk."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("results/runs/*/samples.jsonl"))


def records(folder: Path) -> list[dict[str, Any]]:
    """Records of the jobs that have ended, of all sweeps of a folder."""
    found = []
    for path in folder.glob("results/sweeps/*/job-*.json"):
        found.append(json.loads(path.read_text()))
    return found


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a repetition must reproduce of each run: samples, scores and bytes; none may occur twice."""
    content = {}
    for path in sorted(folder.glob("results/runs/*")):
        stored = samples.read_samples(path / "samples.jsonl")
        assert not stored.damaged and not stored.torn
        assert len(stored.rows) == (path / "samples.jsonl").read_bytes().count(b"\n"), "a sample was made twice"
        metrics = json.loads((path / "metrics.json").read_text())
        rows = {name: outputs(row) for name, row in stored.rows.items()}
        content[path.name] = {"rows": rows, **{key: metrics[key] for key in ("status", "scores", "mean", "kv_bytes")}}
    return content


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
