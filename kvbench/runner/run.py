"""Execution of one run: samples become rows on disk, then `metrics.json`. A repeated run adds only missing samples."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbench import loggers
from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.models.locate import locate
from kvbench.results import code as codes
from kvbench.results import load
from kvbench.results.environment import environment
from kvbench.results.identity import run_id
from kvbench.results.samples import MEASURED, DiskError, Row
from kvbench.results.store import RunStore
from kvbench.runner import origins, ranks, remarks, resolve, stored, workers
from kvbench.runner.batching import check_any, check_ids
from kvbench.runner.gate import check_fits
from kvbench.runner.rerun import Rerun
from kvbench.runner.run_state import RunState
from kvbench.runner.scoring import rescored
from kvbench.runner.steps import Batch, Steps, alone
from kvbench.tasks.base import Sample
from kvbench.util.failures import describe_error, is_out_of_memory
from kvbench.util.progress import Progress, say

if TYPE_CHECKING:
    from kvbench.runner.session import Session
    from kvbench.runner.workers import Elsewhere, Outcome


#: keys of `env.json` that some runs lack
OPTIONAL = ("weights", "arithmetic", "usual_dtype", "slower", "dequantized", "endpoint")


def answer_run(config: RunConfig | Mapping[str, Any], begun: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run the samples of one configuration that have no stored row yet, and return the run's metrics.

    If no sample is missing, no model is loaded. If the scorer has changed, stored answers are scored again.

    Args:
        config: the configuration, checked or as plain data: `model`, `method`, `quantizer`, `dataset`, `decoding`,
            `runtime`, `logger`.
        begun: called with the id of the run before it starts.

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
    checked = config if isinstance(config, RunConfig) else checked_config(config)
    check_here(checked)
    with ranks.terminated_as_interrupt(), ranks.joined_ranks(checked) as team:
        if team is not None and team.rank > 0:
            return ranks.follow(checked, team)
        name = run_id(resolve.material(checked))
        if begun is not None:
            begun(name)
        checked = resolve.fitted(checked)
        store = RunStore(checked.runtime.results_dir, name, say)
        with store.hold():
            try:
                return alone(RunSteps(checked, store, team).steps())
            finally:
                if team is not None:
                    team.on_failure = None


class RunSteps(RunState):
    """The steps of one run while its directory is locked; arguments as for :class:`RunState`."""

    def steps(self) -> Steps:
        """Run the missing samples, and return the content of `metrics.json`.

        It yields each batch of samples whose rows the caller must compute and send (:mod:`kvbench.runner.steps`).
        """
        before = dict(self.store.metrics() or {})  # the stored `metrics.json`, if there is one
        if before.get("env"):  # optional keys that were missing are read as None: leave them out again
            before["env"] = {key: value for key, value in before["env"].items() if value or key not in OPTIONAL}
        self.store.start(self.config)
        self.rows = self.store.recover()
        if not self.rows and before.get("status") != "oom":
            locate(self.checked.model)  # fail early if the weights are unavailable
        if self.task.needs_tokenizer:
            from kvbench.models.load import load_tokenizer

            self.task.bind(load_tokenizer(self.checked.model))
        if self.checked.runtime.rerun is True:
            self._drop_older()
        elif self.checked.runtime.rerun:
            self._begin_rerun()
        if self.checked.runtime.retry == "oom":  # points that did not fit are tried again
            self.rows = {name: row for name, row in self.rows.items() if row.get("status") != "oom"}
        missing = self._missing()
        check_ids(self.samples)
        if missing and self._final_oom(before):
            self.failures.oom, self.environment = before.get("oom") or {}, before.get("env") or self.environment
            # runtime.rerun still repeats the rows that there are
            missing = [sample for sample in missing if sample.id in self.again]
        elif not missing:
            say(f"{self.label}: all {len(self.samples)} samples are already done")
            # a finished run keeps the environment in which it was made
            self.environment = before.get("env") or self.environment
            if before.get("env") and self.store.environment() != before["env"]:
                self.store.write_environment(before["env"])
        wanted = [sample.id for sample in self.samples]
        stored.check_older_rows(self.rows, wanted, len(missing), self.code, self.checked, label=self.label, say=say)
        excerpts = {sample.id: remarks.shown_excerpts(sample) for sample in self.samples}
        self.logger = loggers.load_logger(
            self.checked.logger, self.store.run_id, self.config, self.label, say, self.store.path
        )
        try:
            if not self.task.adaptive:
                check_any(self.samples, self.checked.dataset)
            self._rescore()
            self.logger.begin(
                [
                    {**row, **excerpts[name]}
                    for name, row in self.rows.items()
                    if name in excerpts and name not in self.again
                ]
            )
            if missing:
                yield from self._generate(missing)
            self._end_rerun()
        except KeyboardInterrupt:
            self._finish("interrupted")
            raise
        except Exception as error:
            self.failures.errors.append({"sample": None, **describe_error(error)})
            with suppress(DiskError):  # the error that is being raised may be the same full disk
                self._finish("error")
            raise
        self.failures.say_repeats()
        return self._finish(self.failures.status)

    def _missing(self) -> list[Sample]:
        """Return the samples that have no row and have not failed; an adaptive task derives them from the rows."""
        done = self.rows.keys() - self.again
        self.samples = self.fitting.chosen(list(self.task.next_samples(self.rows)), done)
        failed = self.failures.samples()
        return [sample for sample in self.samples if self._lacks(sample.id) and sample.id not in failed]

    def _lacks(self, name: str) -> bool:
        """Return True if a sample has no row, or one that is to be repeated."""
        return name not in self.rows or name in self.again

    def _drop_older(self) -> None:
        """Drop the rows made by older code, so that their samples run again; the new rows will replace them on disk."""
        self.rows, older = stored.split_by_code(self.rows, self.code)
        if older:
            say(
                f"{self.label}: {len(older)} stored samples were made by older code; running them again, because "
                "runtime.rerun=true"
            )

    def _begin_rerun(self) -> None:
        """Drop the rows that ``runtime.rerun=all`` replaces, or record the rows whose times are measured again."""
        mode = str(self.checked.runtime.rerun)
        anew = mode == "all" or self.task.times_only or self.task.adaptive
        self.rerun, before = Rerun(self.store, mode, anew=anew), len(self.rows)
        self.rows, self.again = self.rerun.split(self.rows, self.code, self.label)
        count = before - len(self.rows) + len(self.again)
        if count:
            kept = "" if anew else "; answers and scores are kept"
            say(f"{self.label}: {count} of {before} stored samples are repeated, because runtime.rerun={mode}{kept}")

    def _end_rerun(self) -> None:
        """Record the end of a repetition, and report the samples that gave another answer than the stored one."""
        if self.rerun is None or self.failures.errors or (self._missing() and self.failures.oom is None):
            return
        self.rerun.end()
        if self.task.adaptive:  # the points of an earlier search are not of this one
            self.store.keep_only(self.rows)
        other = self.rerun.differing([self.rows[sample.id] for sample in self.samples if sample.id in self.rows])
        if other:
            say(
                f"{self.label}: warning: {len(other)} of {len(self.samples)} samples gave another answer than the "
                f"stored one, which is kept; their times are those of the other: {', '.join(other)}\n"
                "  hint: set runtime.rerun=all to make answers and times anew"
            )

    def _final_oom(self, before: Mapping[str, Any]) -> bool:
        """Return True, after a message, if an earlier run ran out of memory and is not to be tried again.

        `before` is the stored `metrics.json` of the run, empty if there is none.
        """
        runtime = self.checked.runtime
        if before.get("status") != "oom" or runtime.retry == "oom":
            return False
        if runtime.rerun == "all" and self.rerun is not None and not self.rerun.ended:
            return False
        changed = codes.changed((before.get("oom") or {}).get("code"), self.code)
        if changed and runtime.rerun is True:
            return False
        with_code = f" with older code (changed since: {', '.join(changed)})" if changed else ""
        again = "runtime.rerun=true" if changed else "runtime.retry=oom"
        say(
            f"{self.label}: an earlier attempt{with_code} ran out of memory, which counts as a result; "
            f"set {again} to try again"
        )
        return True

    def _settle_arithmetic(self) -> None:
        """Use the arithmetic dtype of the stored rows or, without any, of the runs that this one is compared with."""
        runtime = self.checked.runtime
        own = [row for row in self.rows.values() if MEASURED in row]
        if self.team is not None or (runtime.arithmetic != "auto" and not own):
            return
        if self.checked.model.dtype == "float32":  # there is nothing to choose
            return
        kept = stored.kept_arithmetic(own, self.store, self.config)
        if kept is None or kept == runtime.arithmetic:
            return
        if runtime.arithmetic != "auto":
            say(
                f"{self.label}: computes in runtime.arithmetic={kept}, as for its {len(own)} stored samples, not in "
                f"{runtime.arithmetic}\n  hint: set runtime.rerun=all to make them anew"
            )
        plain = {**self.config, "runtime": {**self.config["runtime"], "arithmetic": kept}}
        self.checked = replace(self.checked, runtime=replace(runtime, arithmetic=kept), plain=plain)

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
        """Load the model and run the missing samples; the first batch is a warm-up whose live tensors are counted."""
        self.checked.method.ready()  # this and the next refuse at once, without torch
        check_fits(self.checked)
        if not self.checked.model.served_elsewhere:
            self._settle_arithmetic()
        origins.settle(self.store, self.checked)  # before weights are loaded, if they are on this machine
        if self.team is not None:
            self.team.on_failure = self._lost
            self.team.tell([sample.id for sample in missing])
        with ExitStack() as stack:
            try:
                session = stack.enter_context(self._opening(missing))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.failures.ran_out(error, None)
                return
            origins.settle(self.store, self.checked)  # and again, now that the weights are on this machine
            machine = session.machine
            self.environment = environment(str(session.device), machine.device, machine.dtypes()) | session.layout()
            self.device = machine.device
            now = machine.dtypes()["arithmetic"]
            earlier = {row[MEASURED].get("arithmetic") for row in self.rows.values() if MEASURED in row} - {None, now}
            if earlier:
                say(f"{self.label}: earlier samples ran in {', '.join(map(str, earlier))}, these run in {now}")
            self.store.write_environment(self.environment)
            stack.callback(self._note_load, load.Moment(), session)
            done = len(self.samples) - len(missing)
            bar = stack.enter_context(Progress(self.label, len(self.samples), done))
            if isinstance(session, workers.Elsewhere):
                self._from_workers(session, bar)
            else:
                session.report = bar.within
                for left, batch in self._batches(session, missing):
                    bar.total = len(self.samples)
                    if not self._keep((yield from _asked(Batch(self.team, session, batch, left))), bar):
                        return
            origins.settle(self.store, self.checked)  # the first search may have fetched the encoder

    def _opening(self, missing: list[Sample]) -> AbstractContextManager[Session | Elsewhere]:
        """Return what runs the missing samples inside a ``with`` block: a session, worker processes or a server."""
        if self.checked.model.served_elsewhere:
            from kvbench.runner.served import open_served

            return open_served(self.checked, missing, self.store.path, list(self.rows.values()))
        from kvbench.models.devices import homes
        from kvbench.profiling.device import device_name

        several = workers.worker_count(self.checked)
        if several > 1:
            return workers.open_workers(self.checked, missing, several)
        device = homes(self.checked.runtime)[0]
        self.environment = environment(str(device), device_name(device))
        return ranks.open_session(self.checked, self.team)

    def _from_workers(self, crew: Elsewhere, bar: Progress) -> None:
        """Store the rows of workers or a server as they come, and at the end order them as one process would have.

        If the run is interrupted, the rows that have come by then are stored too.
        """
        try:
            for outcome in crew.outcomes():
                if not self._keep(outcome, bar):
                    crew.stop()
        except BaseException:
            for outcome in crew.unseen():
                if self._lacks(outcome[0][0].id):  # the batch's first sample: its row is not stored yet
                    self._keep(outcome, bar)
            raise
        finally:
            self.store.arrange(crew.order())

    def _batches(self, session: Session, missing: list[Sample]) -> Iterator[tuple[int, list[Sample]]]:
        """Yield the batches of the missing samples, each with the number of those that follow.

        An adaptive task is asked for its next sample after each batch; the number then counts the samples known so far.
        """
        if not self.task.adaptive:
            planned = session.plan(missing)
            yield from zip(reversed(range(len(planned))), planned, strict=True)
            return
        while missing:
            yield len(missing) - 1, missing[:1]
            missing = self._missing()


def _asked(batch: Batch) -> Generator[Batch, list[Row], Outcome]:
    """Yield one batch to the caller, which runs it; return its samples with their rows or the exception."""
    try:
        return batch.samples, (yield batch)
    except Exception as error:
        return batch.samples, error
