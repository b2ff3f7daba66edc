"""Runs one run undisturbed, killed again and again, and in two processes at once; in forked children. Prints JSON.

python -m tests.kill_driver DIR KILLS SEED [answers]

With ``answers``, the run compares predictions over long answers of fp16, which it makes and stores first.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvbench.results import samples
from kvbench.runner.run import answer_run
from tests.run_support import config

SAMPLES = 24
#: samples of a run over long answers
ANSWERS = 6
#: line on standard error before the messages of the two processes that do one run
RACE = "two processes"


def forked(work: Callable[[], object]) -> int:
    """Start a child that does `work` and ends; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def work(directory: Path) -> Callable[[], object]:
    made = config(directory, dataset={"limit": SAMPLES, "new_tokens": 8})
    return lambda: answer_run(made)


def compare_answers(directory: Path) -> Callable[[], object]:
    text = directory.parent / "text.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(" ".join(f"word{(7 * k * k + 3 * k) % 61}" for k in range(400)), encoding="utf-8")
    options = {"path": str(text), "lengths": [100], "limit": ANSWERS, "per_document": None, "max_new_tokens": 400}
    dataset = {"_target_": "kvbench.tasks.fidelity.Fidelity", "name": "fidelity", "over": "text", "options": options}
    made = {**config(directory, model={"max_length": 2048}), "dataset": dataset}
    return lambda: answer_run(made)


def rows(directory: Path) -> int:
    return sum(len(samples.read_samples(path).rows) for path in directory.glob("*/samples.jsonl"))


def kill(
    directory: Path, kills: int, seed: int, session_s: float, work: Callable[[Path], Callable[[], object]] = work
) -> dict[str, object]:
    """Kill `kills` sessions at random moments, then let the run end; a short session takes `session_s`.

    Where a run ends before it was killed often enough, the next one begins in a fresh directory. The first of every
    four kills waits for a row that its session wrote, so that there are some in the midst of a run on any machine.
    """
    rng = random.Random(seed)
    rounds: list[list[int]] = [[]]
    killed = 0
    while killed < kills:
        place = directory / str(len(rounds) - 1)
        child = forked(work(place))
        before, ended = rows(place), 0
        if killed % 4 == 0:
            while rows(place) == before and not ended:
                time.sleep(0.005)
                ended, status = os.waitpid(child, os.WNOHANG)
        else:
            time.sleep(rng.uniform(0.1, 2.0) * session_s)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            rounds[-1].append(rows(place))
        else:
            rounds.append([])
            session_s *= 0.7  # measured once, perhaps on a busy machine
    _, status = os.waitpid(forked(work(directory / str(len(rounds) - 1))), 0)
    return {"rounds": rounds, "status": os.waitstatus_to_exitcode(status)}


def race(directory: Path) -> list[int]:
    """Two processes on one run at the same time."""
    children = [forked(work(directory)) for _ in range(2)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork of a process with OpenMP threads would hang
    place, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with TemporaryDirectory() as elsewhere:  # whatever is imported on the way is imported before the first fork
        answer_run(config(elsewhere, "fp16", dataset={"limit": 2}))
        gc.collect()
        if sys.argv[4:] == ["answers"]:
            whole = compare_answers(place / "whole")()
            gc.collect()
            gc.freeze()
            print(json.dumps({"whole": whole, "kill": kill(place / "kill", kills, seed, 2.0, compare_answers)}))
            sys.exit()
        gc.freeze()  # as in tests/conftest.py
        started = time.perf_counter()
        answer_run(config(elsewhere, dataset={"limit": 2}))
        session_s = time.perf_counter() - started
    answer = {"whole": work(place / "whole")(), "kill": kill(place / "kill", kills, seed, session_s)}
    print(RACE, file=sys.stderr, flush=True)
    print(json.dumps({**answer, "race": race(place / "race")}))
