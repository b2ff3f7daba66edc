"""The worker that measures jobs one after the other in one process, with one model at a time, until a deadline.

Each job is a line of a log, appended when it has ended: its status, its seconds, and the file that ``kvbench.bench``
would have written. What memory cannot hold is a result. A log that is there already says which jobs are done.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.cells.jobs import LOAD
from kvbench.errors import DataError
from kvbench.models import shared

#: seconds after the deadline at which the present job is given up
GRACE = 20.0
#: what a job should take is multiplied by this before it must fit into the time that is left
MARGIN = 1.2
#: tokens of the prompt that is read once before a model's first job, so that no job has the first prefill in its time
FIRST_PROMPT = 2048
Job = Mapping[str, Any]
Line = dict[str, Any]


class OutOfTime(BaseException):
    """The deadline has passed while a job was measured; no measurement may take it for a failure of its own."""


def logged(folder: Path) -> list[Line]:
    """Return the lines of all logs (``*.jsonl``) of a folder, in order; a line that was cut off is left out.

    A line whose memory ended late (:func:`ended_late`) has failed.

    Raises:
        DataError: a line is not one of the worker's.
    """
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not (isinstance(line, dict) and {"job", "status"} <= line.keys()):
                raise DataError(f"{path} is no log of jobs: {text[:60]}\n  hint: give a folder that has only such logs")
            if any(map(ended_late, (line.get("content") or {}).get("rows") or ())):
                line["status"] = "failed"
            lines.append(line)
    return lines


def part_of(jobs: Sequence[Job], part: int, parts: int) -> list[Job]:
    """Return the jobs of one of several workers, in order: whole models, shared so that all take about as long."""
    seconds: dict[str, float] = {}
    for job in jobs:
        seconds[job["model"]] = seconds.get(job["model"], LOAD) + job["seconds"]
    loads, owner = [0.0] * parts, dict[str, int]()
    for model in sorted(seconds, key=seconds.__getitem__, reverse=True):
        owner[model] = loads.index(min(loads))
        loads[owner[model]] += seconds[model]
    return [job for job in jobs if owner[job["model"]] == part]


class Worker:
    """One process on one GPU.

    Args:
        out: folder of the log.
        name: name of the log.
        seconds: time from now until the deadline.
        device: torch's name of the device.
    """

    def __init__(self, out: Path, name: str, seconds: float, device: str = "cuda") -> None:
        self.began = time.perf_counter()
        self.deadline, self.device, self.model = self.began + seconds, device, ""
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / f"{name}.jsonl"
        #: what ends the log's last line if a process was killed while it wrote it
        self.end = "\n" if self.log.exists() and not self.log.read_bytes().endswith(b"\n") else ""
        before = logged(out)
        self.done = {_key(line["job"]) for line in before if line["status"] in ("ok", "oom")}
        #: by setting, the smallest batch that ran out of memory
        self.ended: dict[str, int] = {}
        for line in before:
            self._note_end(line)

    def measure(self, jobs: Iterable[Job]) -> int:
        """Measure the jobs that fit into the time, and return how many were measured."""
        count = 0
        with shared.sharing(), _alarm(self.deadline + GRACE - time.perf_counter()):
            try:
                for job in jobs:
                    if (reason := self._skipped(job)) is not None:
                        self._say(job, reason)
                        continue
                    count += 1
                    self._measure(job)
            except OutOfTime:
                print("out of time", flush=True)
            finally:
                shared.free()
        return count

    def _skipped(self, job: Job) -> str | None:
        if _key(job) in self.done:
            return "done before"
        if job["ends"] is not None and self.ended.get(job["ends"][0], job["ends"][1]) < job["ends"][1]:
            return "a smaller batch has ended memory"
        left = self.deadline - time.perf_counter()
        needed = MARGIN * (job["seconds"] + LOAD * (job["model"] != self.model))
        return f"needs {needed:.0f} s, and {left:.0f} s are left" if needed > left else None

    def _measure(self, job: Job) -> None:
        began = time.perf_counter()
        line: Line = {"job": dict(job), "status": "failed"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            try:
                self._begin(job)
                self._bench(job["command"], path)
                line["status"] = "ok"
            except Exception as error:  # lack of memory, too, where no row could say so
                line["message"] = f"{error}"[:400]
            finally:
                line["seconds"] = round(time.perf_counter() - began, 2)
                if path.exists():
                    line["content"] = stored.content(path)
                    if line["status"] == "ok":
                        line["status"] = state_of(line["content"]["rows"])
                with self.log.open("a", encoding="utf-8") as log:
                    log.write(self.end + json.dumps(line) + "\n")
                self.end = ""
                self._note_end(line)
                self._say(job, f"{line['status']}, {line['seconds']:.1f} s {line.get('message', '')}")

    def _begin(self, job: Job) -> None:
        """Load the job's model if it is another one, and calibrate it if the job's method needs that."""
        if job["model"] != self.model:
            self.model = job["model"]
            first_prefill(self.model, self.device)
        if job["calibrate"]:
            calibrate(job["calibrate"], self.device)

    def _bench(self, command: Sequence[str], path: Path) -> None:
        from kvbench.bench.__main__ import COMMANDS, bench_function, bench_parser

        name = command[0]
        args = bench_parser(name).parse_args([*command, "--device", self.device, "--out", str(path)])
        args.argv = list(command)
        bench_function(COMMANDS[name].run)(args)

    def _note_end(self, line: Mapping[str, Any]) -> None:
        if line["status"] == "oom" and line["job"]["ends"] is not None:
            name, batch = line["job"]["ends"]
            self.ended[name] = min(batch, self.ended.get(name, batch))

    def _say(self, job: Job, text: str) -> None:
        past = time.perf_counter() - self.began
        print(f"[{past:.0f} s] {' '.join(job['command'][1:7])}: {text}", file=sys.stderr, flush=True)


def ended_late(row: Mapping[str, Any]) -> bool:
    """Return True if a row of a point ran out of memory after it had read the prompts, which is no answer.

    The cache has its size by then, and the allocator may only lack one piece. Rows that are stored already are not
    judged by this: the folds take them as they are.
    """
    return row.get("status") == "oom" and row.get("phase") in ("decode", "end")


def state_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the state of a job with these rows: the first that is not ``ok``, and ``failed`` if memory ended late."""
    states = ["failed" if ended_late(row) else str(row.get("status")) for row in rows]
    return "failed" if "failed" in states else next((state for state in states if state != "ok"), "ok")


def _key(job: Job) -> str:
    return " ".join(job["command"])


def first_prefill(model: str, device: str) -> None:
    """Load a model and read a long prompt twice, so that libraries are loaded before anything is timed."""
    import torch

    from kvbench.bench.choices import model_config
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.decoding.compiled import load_joined

    torch._dynamo.reset()  # compilations of other models count against a limit
    runtime = RuntimeConfig(device=device, compile=True)  # it serves steps that are not compiled, too
    loaded = shared.take(model_config(model), runtime, load_joined)
    if loaded.device.type == "cuda":
        ids = torch.ones(1, FIRST_PROMPT, dtype=torch.long, device=loaded.device)
        with torch.inference_mode():
            for _ in range(2):
                loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize(loaded.device)
    shared.give_back(loaded)


def calibrate(arguments: Sequence[str], device: str) -> None:
    """Make a calibration file unless it is there; for random weights, any text will do."""
    from kvbench.calibration import file
    from kvbench.cli.calibrate import calibrate_parser, model_config, run_calibration

    args = calibrate_parser(None).parse_args([*arguments, "--device", device])
    name = model_config(args.model, None, None, True).calibrated_as
    path = file.FOLDER / f"{name.replace('/', '--')}-1pct.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(run_calibration(args), flush=True)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the ``with`` block after some seconds."""

    def late(number: int, frame: object) -> None:
        raise OutOfTime("the deadline has passed")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
