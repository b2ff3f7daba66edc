"""The state of one run, and all that it writes: rows, the load of the machine and, at its end, `metrics.json`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbench import loggers
from kvbench.config.run_config import RunConfig
from kvbench.results import code as codes
from kvbench.results import load, summary
from kvbench.results.environment import environment
from kvbench.results.identity import content_digest, short_name
from kvbench.results.samples import MEASURED, DiskError, Row
from kvbench.results.store import RunStore
from kvbench.runner import origins, remarks, sources, workers
from kvbench.runner.failures import Failures, lost
from kvbench.runner.rerun import Rerun
from kvbench.tasks.base import Sample, Task
from kvbench.util.failures import is_out_of_memory
from kvbench.util.progress import Progress

if TYPE_CHECKING:
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session
    from kvbench.runner.workers import Outcome, Workers


class RunState:
    """The state of one run while its directory, `store`, is locked by the caller.

    `checked` is the configuration with the group sizes that are really used; `team` is None for a single process.
    """

    def __init__(self, checked: RunConfig, store: RunStore, team: Team | None) -> None:
        self.checked, self.store, self.team = checked, store, team
        self.label = short_name(self.config)
        self.environment = environment()
        self.code = sources.code(self.config)
        self.failures = Failures(self.label, self.code)
        self.device: str | None = None
        #: the samples of the run, and the rows on disk by sample id
        self.samples: list[Sample] = []
        self.rows: dict[str, Row] = {}
        #: the repetition of stored rows, and the ids of those that it has still to repeat
        self.rerun: Rerun | None = None
        self.again: set[str] = set()
        self.logger: loggers.Logger
        self._ending = threading.Lock()
        self._ended: dict[str, Any] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as plain data, as it is stored."""
        return self.checked.plain

    @property
    def task(self) -> Task:
        """The data set of the run."""
        return self.checked.task

    def _keep(self, outcome: Outcome, bar: Progress) -> bool:
        """Store the rows of a batch, or record its exception; return False if the run must end."""
        batch, rows = outcome
        if isinstance(rows, Exception):
            if is_out_of_memory(rows):
                self.failures.ran_out(rows, batch[0].id)
                return False
            return self.failures.add(batch[0].id, rows, bar.say) and not (self.team is not None and self.team.broken)
        on_gpu = str(self.environment["device"]).startswith("cuda")
        for row in rows:
            row[MEASURED]["code"] = codes.used(self.code, row, on_gpu=on_gpu)
        if self.rerun is not None:
            rows = [self.rerun.row(self.rows.get(row["id"]), row) for row in rows]
        self.store.append(rows)
        self.rows.update({row["id"]: row for row in rows})
        self.again -= {row["id"] for row in rows}
        samples = {sample.id: sample for sample in batch}
        for row in rows:
            self.logger.sample({**row, **remarks.shown(samples[row["id"]])})
        bar.advance(len(rows), remarks.note(rows[-1]))
        return True

    def _note_load(self, start: load.Moment, session: Session | Workers) -> None:
        """Record how busy the machine was since `start`; the notes below a table say if that distorts times.

        The worker processes of a session count as part of the run.
        """
        end, pids = load.Moment(), []
        if isinstance(session, workers.Workers):
            self.environment |= session.layout()  # now with the devices of all workers
            pids = session.pids
        self.environment["load"] = load.between(start, replace(end, own=end.own + load.cpu_seconds(pids)))
        with suppress(DiskError):  # metrics.json holds it too, and raises if it cannot be written
            self.store.write_environment(self.environment)

    def _lost(self, failure: Mapping[str, Any]) -> None:
        """Record that another rank failed; this process then ends, as its main thread would wait for it forever."""
        self._finish(*lost(failure))

    def _finish(
        self, status: str, oom: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the end of the run on the first call; later calls return what that one wrote.

        Both the main thread and the one that watches the other ranks may call this. `oom` and `error` are records of
        what happened on another rank, if anything did.
        """
        with self._ending:
            if self._ended is None:
                self.failures.oom = {**oom, "code": self.code} if oom else self.failures.oom
                self.failures.errors += [error] if error else []
                self._ended = self._write(status)
            return self._ended

    def _write(self, status: str) -> dict[str, Any]:
        """Write `metrics.json`, send it to the logger, and return it; a failing logger cannot lose it."""
        asked = {sample.id for sample in self.samples}
        metrics = summary.build(
            self.store,
            self.config,
            status=status,
            rows=[self.rows[sample.id] for sample in self.samples if sample.id in self.rows],
            left_out=[name for name, row in self.rows.items() if name not in asked and not row.get("warm_up")],
            requested=sum(not sample.warm_up for sample in self.samples),
            task_version=int(self.task.version),
            environment=self.environment,
            device=self.device,
            oom=self.failures.oom,
            errors=list(self.failures.errors),
            code=self.code,
            data={"identity": self.task.identity(), "notes": self.task.notes(), **origins.noted(self.store)},
        )
        metrics["untouched"] = remarks.untouched(
            self.checked.method, [self.rows[sample.id] for sample in self.samples if sample.id in self.rows]
        )
        self.store.write_metrics(metrics)
        summary.pair_siblings(self.store)
        self._deliver(metrics)
        return {**metrics, "run_dir": str(self.store.path)}

    def _deliver(self, metrics: Mapping[str, Any]) -> None:
        """Send the metrics to the logger unless it has them already.

        A delivery is recorded only after it has succeeded, so one that was cut off is repeated when the run is started
        again.
        """
        place, digest = self.logger.destination(), content_digest(self.store.metrics() or metrics)
        if place is not None and self.store.deliveries().get(place) == digest:
            return
        self.logger.finish(metrics)
        place = self.logger.destination()  # differs from before if the service could not be reached
        if place is not None and not self.logger.failed:
            with suppress(DiskError):  # then it is sent once more
                self.store.record_delivery(place, digest, self.logger.local)
