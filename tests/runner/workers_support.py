"""A data set whose scorer kills the process that first scores a certain sample, or runs out of memory there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbench.results.samples import MEASURED
from kvbench.runner import batching, ranks, sources, workers
from kvbench.runner.rows import Machine, head
from kvbench.runner.run import answer_run
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample, Task
from tests.parallel.crew_support import once
from tests.run_support import ToyTask, config


@dataclass(kw_only=True)
class Deadly(ToyTask):
    """:class:`ToyTask`; scoring the sample `victim` kills the process once, or raises `error`."""

    victim: str = ""
    folder: str = ""
    error: str = ""
    always: bool = False
    waits: bool = False

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        if sample.id == self.victim:
            if self.error == "memory":
                raise MemoryError("tried to allocate 77 bytes")
            if self.error:
                raise ValueError(self.error)
            if self.waits:
                while not (Path(self.folder) / "go").exists():
                    time.sleep(0.01)
            elif self.always or once(Path(self.folder) / "died"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().score(sample, prediction)


class MadeUp:
    """A session that writes rows without a model, so that a worker starts at once."""

    device = SimpleNamespace(type="cpu")
    machine = Machine("a cpu", "float32")
    task: Task

    def layout(self) -> dict[str, Any]:
        return {"devices": ["cpu"], "layout": "one device"}

    def plan(self, samples: list[Sample]) -> list[list[Sample]]:
        return batching.plan(samples, 2)

    def rows(self, samples: list[Sample]) -> list[dict[str, Any]]:
        rows = []
        for sample in samples:
            parts = {"total": len(sample.prompt), "codes": len(sample.prompt), "scales": 0, "window": 0, "index": 0}
            row = {
                **head(sample, 20, "length", prediction=sample.id, tokens=(1, 2)),
                **scored(self.task, sample, sample.id),
                "nll": None,
                "kv_bytes": {"used": parts, "reserved": parts, "fp16_equivalent": 400},
                MEASURED: self.machine.measured(len(samples), None, None, ttft_s=0.5, step_s=[0.25], decoded=1),
            }
            rows.append(row)
        return rows


@contextmanager
def serve(argument: dict[str, Any], number: int) -> Iterator[Any]:
    @contextmanager
    def opened(checked: Any, team: None) -> Iterator[MadeUp]:
        session = MadeUp()
        session.task = checked.task
        yield session

    with workers.serve(argument, number, opened) as served:
        yield served


def light(patch: Callable[[Any, str, Any], None]) -> None:
    """Replace what loads a model and reads sources, so that runs of this process and of its workers need neither."""

    @contextmanager
    def opened(checked: Any, team: None) -> Iterator[MadeUp]:
        session = MadeUp()
        session.task = checked.task
        yield session

    patch(ranks, "open_session", opened)
    patch(workers, "SERVER", "tests.runner.workers_support:serve")
    patch(sources, "code", lambda config: {"method": "m" * 12, "scorer": "s" * 12})


if __name__ == "__main__":  # a run on two workers whose last sample never ends
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    light(setattr)
    target = {"_target_": "tests.runner.workers_support.Deadly", "limit": 7, "folder": sys.argv[1]}
    made = config(sys.argv[1], dataset={**target, "victim": "second/5", "waits": True})
    answer_run({**made, "runtime": {**made["runtime"], "workers": 2, "batch_size": 2}})
