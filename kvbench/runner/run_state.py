"""The state of one run, and all that it writes: rows, failures, the machine's load and, at its end, `metrics.json`.

Failures are errors in single samples, and running out of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvbench import loggers
from kvbench.config.run_config import RunConfig
from kvbench.results import code as codes
from kvbench.results import load, summary, tables
from kvbench.results.code import Code
from kvbench.results.environment import environment
from kvbench.results.identity import content_digest, short_name
from kvbench.results.samples import MEASURED, DiskError, Row
from kvbench.results.store import RunStore
from kvbench.runner import origins, remarks, sources, workers
from kvbench.runner.fitting import Fitting
from kvbench.runner.rerun import Rerun
from kvbench.tasks.base import Sample, Task
from kvbench.util.failures import bytes_asked, describe_error, is_out_of_memory
from kvbench.util.progress import Progress, say

if TYPE_CHECKING:
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session
    from kvbench.runner.workers import Elsewhere, Outcome


#: number of failed samples at which a run gives up: one bad record must not end it, a broken installation must
MAX_ERRORS = 3


@dataclass
class Failures:
    """Records of the errors and of the out-of-memory error that occurred in a run so far.

    Args:
        code: digests of the current code (:mod:`kvbench.runner.sources`).
        errors: ``{sample, type, message, traceback}`` of each error; ``sample`` is None for an error outside a sample.
        oom: ``{bytes_asked, sample, message, code}`` of the out-of-memory error; ``sample`` is None if memory ran out
            while the model was being loaded. None if memory sufficed.
    """

    label: str
    code: Code = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    oom: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The run's status: ``oom`` if memory ran out, else ``error`` if there was an error, else ``ok``."""
        return "oom" if self.oom is not None else "error" if self.errors else "ok"

    def samples(self) -> set[str | None]:
        """Return the ids of the samples that raised errors, and None if there was an error outside a sample."""
        return {error["sample"] for error in self.errors}

    def add(self, sample: str, error: Exception, show: Callable[[str], None]) -> bool:
        """Record the error of a sample, and show it unless an earlier error had the same message.

        The result is False if the run must end because :data:`MAX_ERRORS` samples have failed, else True.
        """
        shown = [entry["message"] for entry in self.errors]
        self.errors.append({"sample": sample, **describe_error(error)})
        if self.errors[-1]["message"] not in shown:
            show(f"{self.label}: {sample}: {error}")
        if len(self.errors) >= MAX_ERRORS:
            show(f"{self.label}: stopped, because {MAX_ERRORS} samples failed")
        return len(self.errors) < MAX_ERRORS

    def ran_out(self, error: BaseException, sample: str | None) -> None:
        """Record and show an out-of-memory error. It gives the run the status ``oom``, a result rather than a failure.

        `sample` is None if the model was being loaded.
        """
        asked = bytes_asked(error)
        self.oom = {"bytes_asked": asked, "sample": sample, "message": str(error)[:1000], "code": self.code}
        size = "an unknown amount" if asked is None else tables.size(asked)
        say(
            f"{self.label}: out of memory during {sample or 'loading the model'} (requested: {size}); "
            "recorded as a result"
        )

    def say_repeats(self) -> None:
        """Show which samples failed with the same message as an earlier sample.

        Their own errors were not shown, because :meth:`add` shows each message only once.
        """
        alike: dict[str, list[str]] = {}
        for error in self.errors:
            alike.setdefault(error["message"], []).append(str(error["sample"]))
        for first, *others in alike.values():
            if others:
                say(
                    f"{self.label}: {len(others)} more samples failed with the same error as {first}: "
                    f"{', '.join(others)}"
                )


def lost(failure: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
    """Return how to record a run that ends because another rank failed.

    `failure` has ``rank``, ``kind`` (name of the exception's class), ``message``, and ``oom`` (True if memory ran out).

    Returns:
        The status of the run (``interrupted``, ``oom`` or ``error``), the record of the out-of-memory error or None,
        and the record of any other error or None. The records have the form of :class:`Failures`, but that of the
        out-of-memory error lacks ``code``.
    """
    message = f"rank {failure['rank']}: {failure['message']}"
    if failure["kind"] == "KeyboardInterrupt":
        return "interrupted", None, None
    if failure["oom"]:
        return "oom", {"bytes_asked": bytes_asked(MemoryError(message)), "sample": None, "message": message}, None
    return "error", None, {"sample": None, "type": failure["kind"], "message": message, "traceback": ""}


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
        self.fitting = Fitting(checked)
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
            self.logger.sample({**row, **remarks.shown_excerpts(samples[row["id"]])})
        bar.advance(len(rows), remarks.note(rows[-1]))
        return True

    def _note_load(self, start: load.Moment, session: Session | Elsewhere) -> None:
        """Record how busy the machine was since `start`, so that tables can warn if this distorts times.

        The worker processes of a session, or its server, count as part of the run.
        """
        end, pids = load.Moment(), []
        if isinstance(session, workers.Elsewhere):
            self.environment |= session.layout()  # now with the devices of all workers
            pids = session.pids
        self.environment["load"] = load.between(start, replace(end, own=end.own + load.cpu_seconds(pids)))
        with suppress(DiskError):  # metrics.json holds it too, and raises if it cannot be written
            self.store.write_environment(self.environment)

    def _lost(self, failure: Mapping[str, Any]) -> None:
        """Record that another rank failed; this process then ends, because its main thread would wait forever."""
        self._finish(*lost(failure))

    def _finish(
        self, status: str, oom: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the final status and figures of the run on the first call; later calls return what the first one wrote.

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
        """Write `metrics.json`, then send it to the logger, and return it; it stays on disk if the logger fails."""
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
            too_long=self.fitting.too_long,
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
