"""Execution of one run on several worker processes, each with a whole model: a batch goes to the next free worker.

The parent acts like a single process: it locks the run, selects the samples, writes the files and calls the loggers.
The workers load the model and run batches. The batches are those of a single process, so the rows are the same.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import ConfigError
from kvbench.parallel.crew import Crew
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.fitting import Fitting
from kvbench.runner.rows import Machine
from kvbench.tasks.base import Sample, Task

#: environment variable with the GPUs that a process may use
GPUS = "CUDA_VISIBLE_DEVICES"
#: environment variable with the number of threads of a process
THREADS = "OMP_NUM_THREADS"

#: what runs in each worker (:class:`kvbench.parallel.crew.Crew`)
SERVER = "kvbench.runner.workers:serve"

#: a batch of samples, and its rows or the exception that it raised
Outcome = tuple[list[Sample], list[Row] | Exception]


class Elsewhere(ABC):
    """Base class of what runs the samples of a run outside its process, and returns their rows as they come.

    Attributes:
        device: torch's name of the device of the first worker, or ``endpoint``.
        machine: names of the device and the dtype, which are copied into each row.
    """

    device: str
    machine: Machine

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of what runs the samples, as far as they are known."""

    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """Return what `env.json` says of the model beside its device and dtypes (:meth:`Session.layout`)."""

    @abstractmethod
    def order(self) -> list[str]:
        """Return the ids of the samples in the order in which a single process would run them."""

    @abstractmethod
    def outcomes(self) -> Iterator[Outcome]:
        """Run all samples, and yield each batch with its rows, or with its exception, as soon as it is done."""

    @abstractmethod
    def stop(self) -> None:
        """Start no more batches; :meth:`outcomes` ends with those that are running."""

    @abstractmethod
    def unseen(self) -> list[Outcome]:
        """Return the batches that were finished but not yet yielded when :meth:`outcomes` was interrupted."""


class Workers(Elsewhere):
    """The worker processes of a run.

    `device` is torch's name of the device of the first worker.
    """

    def __init__(self, crew: Crew, missing: Sequence[Sample]) -> None:
        self._crew = crew
        self._samples = {sample.id: sample for sample in missing}
        ((_, answer),) = crew.outcomes([{"plan": list(self._samples)}])
        if isinstance(answer, Exception):
            raise answer
        self._batches = [[self._samples[name] for name in names] for names in answer]
        facts = next(iter(crew.facts.values()))
        self.device, self.machine = facts["device"], Machine(**facts["machine"])

    def layout(self) -> dict[str, Any]:
        """Return the devices of all workers, and the description of their model (:meth:`Session.layout`)."""
        facts = [self._crew.facts[number] for number in sorted(self._crew.facts)]
        return {**facts[0]["layout"], "devices": [name for one in facts for name in one["layout"]["devices"]]}

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._crew.pids

    def order(self) -> list[str]:
        """Return the ids of the samples in the order of the batches."""
        return [sample.id for batch in self._batches for sample in batch]

    def outcomes(self) -> Iterator[Outcome]:
        """Hand all batches to the workers, and yield them as they are done."""
        requests = [{"rows": [sample.id for sample in batch]} for batch in self._batches]
        for index, answer in self._crew.outcomes(requests):
            yield self._batches[index], answer

    def stop(self) -> None:
        """Hand out no more batches."""
        self._crew.stop()

    def unseen(self) -> list[Outcome]:
        """Return the batches that are done, but not yielded."""
        return [(self._batches[index], answer) for index, answer in self._crew.unseen() if isinstance(index, int)]


def worker_count(checked: RunConfig) -> int:
    """Return the number of worker processes of a run; 1 if the run takes place in this process.

    Raises:
        ConfigError: there are fewer GPUs than workers.
    """
    wanted = checked.runtime.workers
    if wanted == 1:
        return 1
    gpus = 0 if checked.runtime.device in ("cpu", "mps") else _gpu_count()
    if wanted == "auto":
        return max(gpus, 1)
    if gpus and wanted > gpus:
        raise ConfigError(
            "runtime.workers",
            wanted,
            f"gives each worker its own GPU, but this machine has {gpus}",
            hint=f"runtime.workers={gpus}, or runtime.workers=auto for all GPUs",
        )
    return wanted


def environments(count: int, on_cpu: bool) -> list[dict[str, str]]:
    """Return the environment variables of each worker: its GPU, or its share of the processors.

    With `on_cpu`, the run must not use a GPU.
    """
    gpus = [] if on_cpu else _gpus()
    if gpus:
        return [{GPUS: name} for name in gpus[:count]]
    if os.environ.get(THREADS):
        return [{} for _ in range(count)]
    threads = max(1, (os.cpu_count() or 1) // count)
    return [{THREADS: str(threads)} for _ in range(count)]


def _gpus() -> list[str]:
    """Return the names of the GPUs of this process, as the environment variable :data:`GPUS` takes them."""
    names = [name for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    return names or [str(index) for index in range(_gpu_count())]


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def open_workers(checked: RunConfig, missing: Sequence[Sample], count: int) -> Iterator[Workers]:
    """Start the workers, yield them to a ``with`` block once the first is ready, and end them after the block."""
    plain = checked.plain
    alone = {**plain, "runtime": {**plain["runtime"], "workers": 1}, "logger": {"name": "none"}}
    count = min(count, len(missing))
    places = environments(count, checked.runtime.device in ("cpu", "mps"))
    with Crew(SERVER, {"config": alone, "count": count}, places) as crew:
        yield Workers(crew, missing)


class _Served:
    """The server of a worker: answers requests for the plan of a run's batches and for the rows of a batch."""

    def __init__(self, session: Any, task: Task, count: int, fitting: Fitting) -> None:
        self._session, self._device = session, session.machine.device
        if session.device.type == "cpu" and count > 1:  # such times are kept apart from those of the whole processor
            self._device = f"{self._device} (shared by {count} workers)"
        with redirect_stderr(io.StringIO()):  # the parent has read the data too, and said what is odd
            self._samples = {sample.id: sample for sample in task.samples()}
        self._fitting = fitting
        self.facts = {
            "device": str(session.device),
            "machine": {"device": self._device, **session.machine.dtypes()},
            "layout": session.layout(),
        }

    def answer(self, request: Mapping[str, list[str]]) -> Any:
        """Return the batches of the sample ids in ``request["plan"]``, or rows of the ids in ``request["rows"]``."""
        if "plan" in request:
            planned = self._session.plan(self._chosen(request["plan"]))
            return [[sample.id for sample in batch] for batch in planned]
        rows: list[Row] = self._session.rows(self._chosen(request["rows"]))
        for row in rows:
            row[MEASURED]["device"] = self._device
        return rows

    def _chosen(self, names: Sequence[str]) -> list[Sample]:
        return self._fitting.chosen([self._samples[name] for name in names], ())


@contextmanager
def serve(argument: Mapping[str, Any], place: int, opening: Callable[..., Any] | None = None) -> Iterator[_Served]:
    """Load the model of a run in a worker process inside a ``with`` block, and yield the object that answers requests.

    `argument` has ``config``, the configuration as plain data, and ``count``, the number of workers. `place` is the
    number of the worker, from 0. `opening` opens a session; None for :func:`kvbench.runner.ranks.open_session`.
    """
    from kvbench.runner import ranks

    checked = checked_config(argument["config"])
    task = checked.task
    if task.needs_tokenizer:
        from kvbench.models.load import load_tokenizer

        task.bind(load_tokenizer(checked.model))
    checked.method.ready()
    with (opening or ranks.open_session)(checked, None) as session:
        yield _Served(session, task, argument["count"], Fitting(checked))
