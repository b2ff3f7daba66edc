"""Execution of one run: samples become rows on disk, then `metrics.json`. A repeated run adds only missing samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbench import loggers
from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import RunConfig, check
from kvbench.models.locate import locate
from kvbench.results import code as codes
from kvbench.results import load, summary, tables
from kvbench.results.environment import environment
from kvbench.results.identity import content_digest, run_id, short_name
from kvbench.results.samples import MEASURED, DiskError, Row
from kvbench.results.store import RunStore
from kvbench.runner import origins, ranks, remarks, resolve, sources, stored, workers
from kvbench.runner.batching import check_any, check_ids
from kvbench.runner.failures import Failures, lost
from kvbench.runner.scoring import rescored
from kvbench.runner.steps import Batch, Steps, alone
from kvbench.tasks.base import Sample, Task
from kvbench.util.failures import describe, is_out_of_memory
from kvbench.util.progress import Progress, say

if TYPE_CHECKING:
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session
    from kvbench.runner.workers import Outcome, Workers


def run(config: Mapping[str, Any], begun: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run the samples of one configuration that have no stored row yet, and return the run's metrics.

    If no sample is missing, no model is loaded. If the scorer has changed, stored answers are scored again.

    Args:
        config: the composed configuration as plain data: `model`, `method`, `quantizer`, `dataset`, `decoding`,
            `runtime`, `logger`.
        begun: function that is called with the id of the run before it starts; None for none.

    Returns:
        The content of `metrics.json`, and the directory of that file as ``run_dir``. ``status`` is ``ok``; ``older`` if
        older code made some of the rows; ``error`` if samples failed (``error`` then holds a message); or ``oom`` if
        memory ran out (``oom.bytes_asked`` then holds the number of bytes requested). After ``oom``, the same command
        does not run the missing samples, unless ``runtime.retry=oom``. A rank other than 0 returns only ``status`` and
        ``rank``.

    Raises:
        ConfigError: a key, a value or a combination is wrong; nothing was written.
        KvbenchError: the model or the data are unavailable, or there was an error outside the samples. The run is
            recorded with the status ``error`` if the list of its missing samples was known by then.
        DiskError: results cannot be written; those on disk stay readable.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the run is recorded as ``interrupted``.
    """
    checked = check(config)
    check_here(checked)
    task = checked.task
    with ranks.terminated_as_interrupt(), ranks.joined(checked, task) as team:
        if team is not None and team.rank > 0:
            return ranks.follow(checked, task, team)
        name = run_id(resolve.material(config, checked, task))
        if begun is not None:
            begun(name)
        config = resolve.fitted(config, checked)
        store = RunStore(checked.runtime.results_dir, name, say)
        with store.hold():
            try:
                return alone(RunSteps(config, checked, task, store, team).steps())
            finally:
                if team is not None:
                    team.on_failure = None


class RunSteps:
    """The state of one run while its directory is locked.

    Args:
        config: the composed configuration, with the group sizes that are really used.
        checked: the same configuration, checked and typed.
        task: data set of the run.
        store: the run's directory, locked by the caller.
        team: the ranks of the run; None for a single process.
    """

    def __init__(
        self, config: Mapping[str, Any], checked: RunConfig, task: Task, store: RunStore, team: Team | None
    ) -> None:
        self.team = team
        self.config, self.checked, self.task, self.store = config, checked, task, store
        self.label = short_name(config)
        self.environment = environment()
        self.code = sources.code(config)
        self.failures = Failures(self.label, self.code)
        self.device: str | None = None
        self._ending = threading.Lock()
        self._ended: dict[str, Any] | None = None

    def steps(self) -> Steps:
        """Run the missing samples, and return the content of `metrics.json`.

        Yields:
            Each batch of samples whose rows the caller must compute and send (:mod:`kvbench.runner.steps`).
        """
        before = dict(self.store.metrics() or {})
        if before.get("env"):  # a key that is only there for 4-bit weights is read as None where it is missing
            before["env"] = {key: value for key, value in before["env"].items() if key != "weights" or value}
        self.store.start(self.config)
        self.rows = self.store.recover()
        if not self.rows and before.get("status") != "oom":
            locate(self.checked.model)  # fail early if the weights are unavailable
        if self.task.needs_tokenizer:
            from kvbench.models.load import load_tokenizer

            self.task.bind(load_tokenizer(self.checked.model))
        if self.checked.runtime.rerun:
            self._drop_older()
        if self.checked.runtime.retry == "oom":  # points that did not fit are tried again
            self.rows = {name: row for name, row in self.rows.items() if row.get("status") != "oom"}
        missing = self._missing()
        check_ids(self.samples)
        if missing and self._final_oom(before):
            self.failures.oom, self.environment = before.get("oom") or {}, before.get("env") or self.environment
            missing = []
        elif not missing:
            say(f"{self.label}: all {len(self.samples)} samples are already done")
            # a finished run keeps the environment in which it was made
            self.environment = before.get("env") or self.environment
            if before.get("env") and self.store.environment() != before["env"]:
                self.store.write_environment(before["env"])
        wanted = [sample.id for sample in self.samples]
        stored.check(self.rows, wanted, len(missing), self.code, self.checked, label=self.label, say=say)
        ends = {sample.id: remarks.shown(sample) for sample in self.samples}
        self.logger = loggers.load(
            self.checked.logger, self.store.run_id, self.config, self.label, say, self.store.path
        )
        try:
            if not self.task.adaptive:
                check_any(self.samples, self.checked.dataset)
            self._rescore()
            self.logger.begin([{**row, **ends[name]} for name, row in self.rows.items() if name in ends])
            if missing:
                yield from self._generate(missing)
        except KeyboardInterrupt:
            self._finish("interrupted")
            raise
        except Exception as error:
            self.failures.errors.append({"sample": None, **describe(error)})
            with suppress(DiskError):  # the error that is being raised may be the same full disk
                self._finish("error")
            raise
        self.failures.say_repeats()
        return self._finish(self.failures.status)

    def _missing(self) -> list[Sample]:
        """Return the samples that have no row and have not failed; an adaptive task derives them from the rows."""
        self.samples = list(self.task.next_samples(self.rows))
        failed = self.failures.samples()
        return [sample for sample in self.samples if sample.id not in self.rows and sample.id not in failed]

    def _drop_older(self) -> None:
        """Drop the rows made by older code, so that their samples run again; the new rows will replace them on disk."""
        self.rows, older = stored.split(self.rows, self.code)
        if older:
            say(
                f"{self.label}: {len(older)} stored samples were made by older code; running them again, because "
                "runtime.rerun=true"
            )

    def _final_oom(self, before: Mapping[str, Any]) -> bool:
        """Return True, after a message, if an earlier run ran out of memory and is not to be tried again.

        Args:
            before: the stored `metrics.json` of the run, empty if there is none.
        """
        runtime = self.checked.runtime
        if before.get("status") != "oom" or runtime.retry == "oom":
            return False
        changed = codes.changed((before.get("oom") or {}).get("code"), self.code)
        if changed and runtime.rerun:
            return False
        with_code = f" with older code (changed since: {', '.join(changed)})" if changed else ""
        again = "runtime.rerun=true" if changed else "runtime.retry=oom"
        say(
            f"{self.label}: an earlier attempt{with_code} ran out of memory, which counts as a result; "
            f"set {again} to try again"
        )
        return True

    def _rescore(self) -> None:
        """Score stored predictions again if the scorer's version or code has changed."""
        fresh = rescored(self.task, self.samples, self.rows, self.code[codes.SCORER])
        if not fresh:
            return
        version = self.task.scorer_version
        say(f"{self.label}: {len(fresh)} stored predictions are scored again (scorer version {version})")
        self.store.append(fresh)
        self.rows.update({row["id"]: row for row in fresh})

    def _generate(self, missing: list[Sample]) -> Generator[Batch, list[Row], None]:
        """Load the model and run the missing samples; the first batch warms up, and its live tensors are counted."""
        from kvbench.models.devices import homes
        from kvbench.profiling.device import device_name

        self.checked.method.ready()
        origins.settle(self.store, self.checked, self.task)  # before weights are loaded, if they are on this machine
        several = workers.number(self.checked)
        if several == 1:
            device = homes(self.checked.runtime)[0]
            self.environment = environment(str(device), device_name(device))
        if self.team is not None:
            self.team.on_failure = self._lost
            self.team.tell([sample.id for sample in missing])
        with ExitStack() as stack:
            try:
                opening: AbstractContextManager[Session | Workers] = (
                    ranks.opened(self.checked, self.task, self.team)
                    if several == 1
                    else workers.opened(self.config, self.checked, missing, several)
                )
                session = stack.enter_context(opening)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.failures.ran_out(error, None)
                return
            origins.settle(self.store, self.checked, self.task)
            machine = session.machine
            self.environment = environment(str(session.device), machine.device, machine.dtype) | session.layout()
            self.device = machine.device
            others = {row[MEASURED].get("dtype") for row in self.rows.values() if MEASURED in row} - {machine.dtype}
            if others:
                say(f"{self.label}: earlier samples ran in {', '.join(map(str, others))}, these run in {machine.dtype}")
            self.store.write_environment(self.environment)
            stack.callback(self._note_load, load.Moment(), session)
            done = len(self.samples) - len(missing)
            bar = stack.enter_context(Progress(self.label, len(self.samples), done))
            if isinstance(session, workers.Workers):
                self._from_workers(session, bar)
            else:
                session.report = bar.within
                for left, batch in self._batches(session, missing):
                    bar.total = len(self.samples)
                    if not self._keep((yield from _asked(Batch(self.team, session, batch, left))), bar):
                        return
            origins.settle(self.store, self.checked, self.task)  # the first search may have fetched the encoder

    def _from_workers(self, crew: Workers, bar: Progress) -> None:
        """Store the rows of worker processes as they come, and order the file as a single process would have left it.

        If the run is interrupted, the rows that have come by then are stored too.
        """
        try:
            for outcome in crew.outcomes():
                if not self._keep(outcome, bar):
                    crew.stop()
        except BaseException:
            for outcome in crew.unseen():
                if outcome[0][0].id not in self.rows:
                    self._keep(outcome, bar)
            raise
        finally:
            self.store.arrange(crew.order())

    def _batches(self, session: Session, missing: list[Sample]) -> Iterator[tuple[int, list[Sample]]]:
        """Yield the batches of the missing samples, each with the number of those that follow.

        An adaptive task is asked for its next sample after each batch; the number is then that of known samples.
        """
        if not self.task.adaptive:
            planned = session.plan(missing)
            yield from zip(reversed(range(len(planned))), planned, strict=True)
            return
        while missing:
            yield len(missing) - 1, missing[:1]
            missing = self._missing()

    def _note_load(self, start: load.Moment, session: Session | Workers) -> None:
        """Record how busy the machine was since `start`, with a message if that distorts times."""
        end, pids = load.Moment(), []
        if isinstance(session, workers.Workers):
            self.environment |= session.layout()  # now with the devices of all workers
            pids = session.pids
        self.environment["load"] = load.between(start, replace(end, own=end.own + load.cpu_seconds(pids)))
        with suppress(DiskError):  # metrics.json holds it too, and raises if it cannot be written
            self.store.write_environment(self.environment)
        busy = load.busyness(self.environment["load"])
        if busy:
            say(f"{self.label}: {busy}")

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
            row[MEASURED]["code"] = codes.used(self.code, on_gpu=on_gpu)
        self.store.append(rows)
        self.rows.update({row["id"]: row for row in rows})
        samples = {sample.id: sample for sample in batch}
        for row in rows:
            self.logger.sample({**row, **remarks.shown(samples[row["id"]])})
        bar.advance(len(rows), remarks.note(rows[-1]))
        return True

    def _lost(self, failure: Mapping[str, Any]) -> None:
        """Record that another rank failed; this process then ends, as its main thread would wait for that rank forever.

        Args:
            failure: see :func:`kvbench.runner.failures.lost`.
        """
        self._finish(*lost(failure))

    def _finish(
        self, status: str, oom: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the end of the run on the first call; later calls return what that one wrote.

        Both the main thread and the one that watches the other ranks may call this.

        Args:
            status: the run's status.
            oom: record of memory that ran out on another rank, if any.
            error: record of an error on another rank, if any.
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
        if metrics["untouched"]:
            say(f"{self.label}: {tables.untouched(metrics)}")
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
                self.store.record_delivery(place, digest)


def _asked(batch: Batch) -> Generator[Batch, list[Row], Outcome]:
    """Have one batch run by the caller of the steps, and return it with its rows or the exception that it raised."""
    try:
        return batch.samples, (yield batch)
    except Exception as error:
        return batch.samples, error
