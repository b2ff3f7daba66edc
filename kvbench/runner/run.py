"""One run: samples in, rows out, `metrics.json` last. Starting the same run again does only what is missing."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from kvbench import loggers, tasks
from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import RunConfig, check
from kvbench.errors import DataError, KvbenchError
from kvbench.methods.load import true_name
from kvbench.models.locate import locate
from kvbench.results import load, summary, tables
from kvbench.results.environment import environment
from kvbench.results.identity import content_digest, identity, run_id, short_name
from kvbench.results.samples import MEASURED, DiskError, Row
from kvbench.results.store import RunStore
from kvbench.runner import ranks, sources
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample, Task
from kvbench.util.failures import bytes_asked, describe, is_out_of_memory
from kvbench.util.progress import Progress, say

if TYPE_CHECKING:
    from kvbench.methods.base import Method
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session

#: samples that may fail before a run gives up: one bad record must not cost the rest, a broken set-up must not go on
MAX_ERRORS = 3

#: characters of a prompt's beginning and end that loggers show
SHOWN = 240


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do one run, or what is missing of it.

    Nothing is generated, and no model is loaded, where all samples are there; rows of an older scorer are scored anew
    from their stored predictions.

    Args:
        config: the composed configuration as plain data: `model`, `method`, `quantizer`, `dataset`, `decoding`,
            `runtime`, `logger`.

    Returns:
        The content of `metrics.json`, and ``run_dir``, where it lies. ``status`` is ``ok``; ``oom`` with
        ``oom.bytes_asked`` (a result: final unless ``runtime.retry=oom``); or ``error`` with ``error`` (a message)
        where samples failed.

    Raises:
        ConfigError: a wrong key, value or combination; nothing was touched.
        KvbenchError: the model or the data cannot be had; recorded as ``error`` (as any error outside a sample is)
            where samples were asked for.
        DiskError: results cannot be written; what is on disk stays readable.
        KeyboardInterrupt: Ctrl-C or SIGTERM, after it was recorded as ``interrupted``.
    """
    checked = check(config)
    check_here(checked)
    task = tasks.load(config["dataset"])
    data = {"identity": task.identity(), "version": task.version}
    if hasattr(task, "setting"):  # a task that measures the machine: on another one it is another run
        data["setting"] = task.setting(checked.runtime, _machine(checked))
    with ranks.terminated_as_interrupt(), ranks.joined(checked, task) as team:
        if team is not None and team.rank > 0:
            return ranks.follow(checked, task, team)
        material = identity(settled(config, checked), data, checked.model.folder(), say)
        config = fitted(config, checked)
        store = RunStore(checked.runtime.results_dir, run_id(material), say)
        with store.hold():
            try:
                return _Run(config, checked, task, store, team).do()
            finally:
                if team is not None:
                    team.on_failure = None


def _machine(checked: RunConfig) -> str:
    """Name of the device that the run would be on."""
    from kvbench.models.devices import homes
    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    devices = homes(checked.runtime)
    name = device_name(devices[0]) or cpu_name()
    return name if len(devices) == 1 else f"{len(devices)} x {name} (device_map)"


def fitted(config: Mapping[str, Any], checked: RunConfig) -> dict[str, Any]:
    """The configuration for the record, with the groups that the model's heads ask for in place of a preset's.

    The quantizer's name says so: ``int2+value.group_size=16``.
    """
    head_dim, made = checked.model.head_dim(), dict(config)
    groups = checked.method.fitted(head_dim) if head_dim else {}
    for key, size in groups.items():
        group, *path = key.split(".")
        made[group] = _with(made[group], path, size)
    if groups:
        name = true_name(made["quantizer"])
        if name == "none":  # the method's own formats
            name = ",".join(f"{key.partition('.')[2]}={size}" for key, size in groups.items())
        made["quantizer"] = {**made["quantizer"], "name": name}
        say(
            f"{short_name(made)}: groups of the default do not divide the model's {head_dim} channels a head; fitted: "
            + ", ".join(f"{key}={size}" for key, size in groups.items())
        )
    return made


def _with(group: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of nested `group` with the key at `path` set."""
    return {**group, path[0]: value if len(path) == 1 else _with(group[path[0]], path[1:], value)}


def settled(config: Mapping[str, Any], checked: RunConfig) -> dict[str, Any]:
    """The configuration with every default filled in: spelling a default out makes no other run."""
    method: dict[str, Any] = dataclasses.asdict(checked.method)
    method.pop("quantizer", None)  # it is a group of its own
    method |= checked.method.identity()
    return {
        **config,
        "model": dataclasses.asdict(checked.model),
        "method": {**method, "_target_": config["method"].get("_target_")},
        "decoding": dataclasses.asdict(checked.decoding),
        "runtime": dataclasses.asdict(checked.runtime),
    }


class _Run:
    """The state of one call of :func:`run` while it holds the run's directory."""

    def __init__(
        self, config: Mapping[str, Any], checked: RunConfig, task: Task, store: RunStore, team: Team | None
    ) -> None:
        self.team = team
        self.config, self.checked, self.task, self.store = config, checked, task, store
        self.label = short_name(config)
        self.environment = environment()
        self.code = sources.digest(checked.method)
        self.errors: list[dict[str, Any]] = []
        self.oom: dict[str, Any] | None = None
        self.device: str | None = None
        self._ending = threading.Lock()
        self._ended: dict[str, Any] | None = None

    def do(self) -> dict[str, Any]:
        """Everything between taking the lock and giving it back."""
        before = self.store.metrics() or {}
        self.store.start(self.config)
        self.rows = self.store.recover()
        if not self.rows and before.get("status") != "oom":
            locate(self.checked.model)  # weights that cannot be had are said before samples are made
        if hasattr(self.task, "bind"):  # a task whose samples are made of the model's tokens
            from kvbench.models.load import load_tokenizer

            self.task.bind(load_tokenizer(self.checked.model))
        if self.checked.runtime.retry == "oom":  # points that did not fit are tried again
            self.rows = {name: row for name, row in self.rows.items() if row.get("status") != "oom"}
        missing = self._missing()
        _check_ids(self.samples)
        if missing and before.get("status") == "oom" and self.checked.runtime.retry != "oom":
            say(f"{self.label}: ran out of memory before, which is a result; runtime.retry=oom tries it again")
            self.oom, self.environment = before.get("oom") or {}, before.get("env") or self.environment
            missing = []
        elif not missing:
            say(f"{self.label}: {len(self.samples)} samples, all there already")
            # a finished run's machine is where it was made, not where it was looked at
            self.environment = before.get("env") or self.environment
            if before.get("env") and self.store.environment() != before["env"]:
                self.store.write_environment(before["env"])
        self._check_code(len(missing))
        ends = {sample.id: shown(sample) for sample in self.samples}
        self.logger = loggers.load(self.checked.logger, self.store.run_id, self.config, self.label, say)
        try:
            self._refuse_empty()
            self._rescore()
            self.logger.begin([{**row, **ends[name]} for name, row in self.rows.items() if name in ends])
            if missing:
                self._generate(missing)
        except KeyboardInterrupt:
            self._finish("interrupted")
            raise
        except Exception as error:
            self.errors.append({"sample": None, **describe(error)})
            with suppress(DiskError):  # the disk that is full; the error says so itself
                self._finish("error")
            raise
        self._say_repeats()
        return self._finish("oom" if self.oom is not None else "error" if self.errors else "ok")

    def _missing(self) -> list[Sample]:
        """Samples that are left to do; those of a task that grows depend on the rows so far."""
        task: Any = self.task
        self.samples = list(task.samples(self.rows) if self.grows else task.samples())
        failed = {error["sample"] for error in self.errors}
        return [sample for sample in self.samples if sample.id not in self.rows and sample.id not in failed]

    @property
    def grows(self) -> bool:
        """Whether what there is to do depends on what came out so far (dataset=efficiency)."""
        return hasattr(self.task, "setting")

    def _refuse_empty(self) -> None:
        """Raise DataError where there is nothing to do: a table without a number is no result."""
        if self.samples or self.grows:
            return
        name, limit = self.checked.dataset.get("name"), self.checked.dataset.get("limit")
        hint = "dataset.limit=8" if limit == 0 else "check the data set's files, dataset.path and dataset.limit"
        raise DataError(f"data set {name}: no samples, so there is nothing to run.\n  hint: {hint}")

    def _check_code(self, missing: int) -> None:
        """Say where stored samples were made by other code of the method than that of now: they are not made anew.

        Args:
            missing: how many samples are to be made now.
        """
        stored = [self.rows[sample.id].get(MEASURED, {}) for sample in self.samples if sample.id in self.rows]
        codes = [str(measured.get("code") or "unknown") for measured in stored]  # older rows do not say it
        now = self.code or "unknown"
        other = [code for code in codes if code != now]
        if not other:
            return
        mixed = (
            f"; the {missing} that are missing are made by the code of now, so the run is of both" if missing else ""
        )
        say(
            f"{self.label}: warning: {len(other)} of {len(self.samples)} samples were made by other code of the method"
            f" ({', '.join(sorted(set(other)))}; now {now}) and are shown as they are{mixed}\n"
            f"  hint: remove {self.store.path} to make them anew, or set runtime.results_dir=DIR to keep both"
        )

    def _rescore(self) -> None:
        """Score stored predictions anew where the scorer has changed since."""
        from_sample = {sample.id: sample for sample in self.samples}
        version = int(self.task.scorer_version)
        stale = [row for row in self.rows.values() if row["scorer_version"] != version and row["id"] in from_sample]
        if not stale:
            return
        say(f"{self.label}: {len(stale)} stored predictions are scored anew (scorer version {version})")
        fresh = [{**row, **scored(self.task, from_sample[row["id"]], row["prediction"])} for row in stale]
        self.store.append(fresh)
        self.rows.update({row["id"]: row for row in fresh})

    def _generate(self, missing: list[Sample]) -> None:
        """Generate what is missing, longest prompt first; the first batch warms up and carries the memory census."""
        from kvbench.models.devices import homes
        from kvbench.profiling.device import device_name

        self.checked.method.ready()
        device = homes(self.checked.runtime)[0]
        self.environment = environment(str(device), device_name(device))
        if self.team is not None:
            self.team.on_failure = self._lost
            self.team.tell([sample.id for sample in missing])
        with ExitStack() as stack:
            try:
                session = stack.enter_context(ranks.opened(self.checked, self.task, self.team))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._ran_out(error, None)
                return
            self.environment = environment(str(session.device), session.device_name, session.dtype) | session.layout()
            self.device = session.device_name
            others = {row[MEASURED].get("dtype") for row in self.rows.values() if MEASURED in row} - {session.dtype}
            if others:
                say(f"{self.label}: samples done before ran in {', '.join(map(str, others))}, these in {session.dtype}")
            self.store.write_environment(self.environment)
            stack.callback(self._note_load, load.Moment())
            done = len(self.samples) - len(missing)
            bar = stack.enter_context(Progress(self.label, len(self.samples), done))
            session.report = bar.within
            if not self.grows:
                for batch in session.plan(missing):
                    if not self._batch(session, batch, bar):
                        return
            while self.grows and missing:
                bar.total = len(self.samples)
                if not self._batch(session, missing[:1], bar):
                    return
                missing = self._missing()

    def _note_load(self, start: load.Moment) -> None:
        """Record how busy the machine was since `start`, and say it where times suffer from it."""
        self.environment["load"] = load.between(start, load.Moment())
        with suppress(DiskError):  # metrics.json says it too, and whether it can be written
            self.store.write_environment(self.environment)
        busy = load.busyness(self.environment["load"])
        if busy:
            say(f"{self.label}: {busy}")

    def _batch(self, session: Session, batch: list[Sample], bar: Progress) -> bool:
        """One batch into rows on disk; False where the run has to end."""
        try:
            rows = ranks.batch(self.team, session, batch)
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out(error, batch[0].id)
                return False
            before = [entry["message"] for entry in self.errors]
            self.errors.append({"sample": batch[0].id, **describe(error)})
            if self.errors[-1]["message"] not in before:
                bar.say(f"{self.label}: {batch[0].id}: {error}")
            if len(self.errors) >= MAX_ERRORS:
                bar.say(f"{self.label}: {MAX_ERRORS} samples failed; giving up")
            return len(self.errors) < MAX_ERRORS and not (self.team is not None and self.team.broken)
        for row in rows:
            row[MEASURED]["code"] = self.code
        self.store.append(rows)
        self.rows.update({row["id"]: row for row in rows})
        samples = {sample.id: sample for sample in batch}
        for row in rows:
            self.logger.sample({**row, **shown(samples[row["id"]])})
        bar.advance(len(rows), _note(rows[-1]))
        return True

    def _say_repeats(self) -> None:
        """Say which samples failed as one before them, whose message was shown."""
        alike: dict[str, list[str]] = {}
        for error in self.errors:
            alike.setdefault(error["message"], []).append(str(error["sample"]))
        for first, *others in alike.values():
            if others:
                say(f"{self.label}: {len(others)} more failed as {first} did: {', '.join(others)}")

    def _ran_out(self, error: BaseException, sample: str | None) -> None:
        asked = bytes_asked(error)
        self.oom = {"bytes_asked": asked, "sample": sample, "message": str(error)[:1000]}
        size = "an unknown amount" if asked is None else tables.size(asked)
        say(f"{self.label}: out of memory at {sample or 'loading the model'}, {size} asked for; recorded as a result")

    def _lost(self, found: Mapping[str, Any]) -> None:
        """Record that another rank's failure ends this process, whose main thread waits for that rank for ever."""
        message = f"rank {found['rank']}: {found['message']}"
        if found["kind"] == "KeyboardInterrupt":
            self._finish("interrupted")
        elif found["oom"]:
            asked = bytes_asked(MemoryError(message))
            self._finish("oom", oom={"bytes_asked": asked, "sample": None, "message": message})
        else:
            self._finish("error", error={"sample": None, "type": found["kind"], "message": message, "traceback": ""})

    def _finish(
        self, status: str, oom: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The run's end, once: the thread that watches the other ranks may come to it together with the main one.

        Args:
            oom, error: why, where it is not known yet; no part of the run where its end was written before.
        """
        with self._ending:
            if self._ended is None:
                self.oom = oom or self.oom
                self.errors = [*self.errors, error] if error else self.errors
                self._ended = self._write(status)
            return self._ended

    def _write(self, status: str) -> dict[str, Any]:
        """Write `metrics.json`, then tell the logger; a logger's failure loses nothing."""
        asked = {sample.id for sample in self.samples}
        metrics = summary.build(
            self.store,
            self.config,
            status=status,
            rows=[self.rows[sample.id] for sample in self.samples if sample.id in self.rows],
            left_out=[name for name, row in self.rows.items() if name not in asked and not row.get("warm_up")],
            requested=sum(not sample.meta.get("warm_up") for sample in self.samples),
            task_version=int(self.task.version),
            environment=self.environment,
            device=self.device,
            oom=self.oom,
            errors=list(self.errors),
            data={"identity": self.task.identity(), "notes": getattr(self.task, "notes", dict)()},
        )
        metrics["untouched"] = untouched(
            self.checked.method, [self.rows[sample.id] for sample in self.samples if sample.id in self.rows]
        )
        if metrics["untouched"]:
            say(f"{self.label}: {tables.untouched(metrics)}")
        self.store.write_metrics(metrics)
        summary.pair_siblings(self.store)
        self._deliver(metrics)
        return {**metrics, "run_dir": str(self.store.path)}

    def _deliver(self, metrics: Mapping[str, Any]) -> None:
        """Give the logger what it lacks: a kill, or a logger's failure, leaves it to the next session."""
        place, digest = self.logger.destination(), content_digest(metrics)
        if place is not None and self.store.deliveries().get(place) == digest:
            return
        self.logger.finish(metrics)
        place = self.logger.destination()  # a service that cannot be reached is another place than was meant
        if place is not None and not self.logger.failed:
            with suppress(DiskError):  # it would be sent once more
                self.store.record_delivery(place, digest)


def untouched(method: Method, rows: Sequence[Row]) -> dict[str, Any] | None:
    """What kept every sample exact, where none was long enough for the method to pack or drop a token; else None.

    Returns:
        ``{"key", "value", "exact", "longest"}``: the hyper-parameter, up to how many tokens it leaves all exact, and
        how many the longest sample had in the cache.
    """
    reach = method.reach()
    cached = [
        # the last token of an answer is never cached, nor is that of a text's window
        int(row["prompt_tokens"]) - ("window" in row) + (0 if reach and reach.of_prompt else _steps(row))
        for row in rows
        if row.get("prompt_tokens")
    ]
    if reach is None or not cached or max(cached) > reach.tokens:
        return None
    return {"key": reach.key, "value": reach.value, "exact": reach.tokens, "longest": max(cached)}


def _steps(row: Row) -> int:
    return max(0, len(row.get("tokens") or ()) - 1)


def _check_ids(samples: list[Sample]) -> None:
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise KvbenchError(f"two samples of the data set share the id {sample.id!r}; results are keyed by it")
        seen.add(sample.id)


def shown(sample: Sample) -> dict[str, str]:
    """What a logger shows of a sample beside its row: the ends of the prompt and the first reference."""
    head, tail = sample.prompt[:SHOWN], sample.prompt[max(SHOWN, len(sample.prompt) - SHOWN) :]
    return {"prompt_head": head, "prompt_tail": tail, "reference": sample.answers[0] if sample.answers else ""}


def _note(row: Row) -> str:
    score = row["scores"].get("score")
    if score is None and "status" in row:
        return f"{row['id']} {row['status']}"
    return f"{row['id']} {'-' if score is None else f'{score:.2f}'}"
