"""Sweeps (``--multirun``): write the plan, run the jobs that are missing, and print a table of all jobs."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kvbench.cli import job, launchers, plan, unit
from kvbench.cli.arguments import Arguments
from kvbench.cli.compose import Composer
from kvbench.cli.hydra_options import help_as_text
from kvbench.cli.job import Outcome
from kvbench.cli.unit import JOBS, run_unit
from kvbench.errors import KvbenchError
from kvbench.parallel import launch
from kvbench.results import ranking, sweeps, tables
from kvbench.results.load import SIDE_BY_SIDE
from kvbench.results.store import DONE, STATUSES
from kvbench.results.sweeps import Job, Manifest, Sweep
from kvbench.util import atomic
from kvbench.util.confdir import conf_dir
from kvbench.util.door import INTERRUPTED
from kvbench.util.progress import say, show
from kvbench.util.requirements import check_writable


@dataclass(frozen=True)
class Call:
    """One call of ``python -m kvbench --multirun``, which starts or continues a sweep.

    Args:
        todo: the jobs that the call runs.
        ended: outcomes of the jobs that an earlier call has finished and that need not run again.
        overrides: what to pass to Hydra besides its options, if a launcher starts the jobs.
        launcher: value of ``launcher=``.
    """

    sweep: Sweep
    todo: Sequence[Job]
    ended: Sequence[Outcome]
    overrides: Sequence[str]
    launcher: str = "local"

    def run(self, extra: Path | None) -> None:
        """Run the jobs one after the other in this process (``launcher=local``)."""
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):  # once for all jobs
            for jobs in plan.units(self.todo):
                run_unit([(one.number, list(one.overrides)) for one in jobs], self.sweep.folder, extra)


def run_sweep(argv: Sequence[str], arguments: Arguments, composer: Composer, texts: Sequence[str]) -> int:
    """Run or continue the sweep of a command line, whose overrides the composer has checked; return the exit status."""
    from kvbench.models import shared

    call = prepare_sweep(argv, texts, composer.typed(texts), composer.extra, with_fp16=arguments.with_fp16)
    unit.forget()
    interrupted = False
    try:
        if call.launcher == "local":
            call.run(composer.extra)
        elif call.todo:
            by_hydra(arguments.argv(call.overrides))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        shared.free()
    status = conclude(call, interrupted=interrupted)
    os.environ.pop(sweeps.TOKEN, None)  # a later run of this process is not of the sweep
    return status


def run_job(config: DictConfig) -> str:
    """Run the jobs of a unit of a sweep, and return the status of the last one: ``ok``, ``oom`` or ``error``.

    Hydra calls this function with the unit under the key ``job``. Errors are printed and recorded; only an interruption
    raises an exception.
    """
    known = HydraConfig.get()
    folders = [Path(source.path) for source in known.runtime.config_sources if source.provider == "command-line"]
    return run_unit(str(config[plan.JOB]), Path(known.sweep.dir), next(iter(folders), None))


def by_hydra(argv: Sequence[str]) -> int:
    """Let Hydra parse `argv` (through ``sys.argv``), compose configurations and launch jobs; return 0."""
    launchers.register()
    original = sys.argv
    sys.argv = [original[0], *argv]
    try:
        with help_as_text():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run_job)()
    finally:
        sys.argv = original
    return 0


def prepare_sweep(
    argv: Sequence[str],
    overrides: Sequence[str],
    jobs: Sequence[Sequence[str]],
    extra: Path | None = None,
    *,
    with_fp16: bool = False,
) -> Call:
    """Write the manifest of a sweep, or find the one of the same command, and return what is to be run.

    Args:
        overrides: the overrides in `argv`.
        jobs: the overrides of each job, without options of Hydra and of the launcher.
        with_fp16: True to add an fp16 job wherever jobs that differ only in the method lack one.

    Raises:
        KvbenchError: the folder of the sweep cannot be created.
        OSError: the manifest cannot be written; nothing has been started.
    """
    planned = plan.ordered(jobs, with_fp16=with_fp16)
    named = [text.split("=", 1)[1].strip("'\"") for text in overrides if text.startswith("hydra.sweep.dir=")]
    launcher = next((text.partition("=")[2] for text in overrides if text.startswith("launcher=")), "local")
    for_launcher = [text for text in overrides if text.startswith(("hydra.", "hydra/", "launcher="))]
    os.environ[JOBS] = str(len(planned))
    os.environ[SIDE_BY_SIDE] = "1" if launcher in ("joblib", "submitit_local", "ray") else ""
    current = _sweep_folder(argv, planned, launcher, named[-1] if named else None)
    os.environ[plan.TOKEN] = current.manifest.token
    todo, ended = list(planned), []
    if launcher != "local":  # a job of another process costs a start, and a machine without the results repeats it all
        ended = [outcome for one in planned if (outcome := _finished(current, one, extra)) is not None]
        over = {outcome["number"] for outcome in ended}
        todo = [one for one in planned if one.number not in over]
    text = plan.for_hydra(plan.units(todo)) if todo else ""
    directory = [] if named else [f"hydra.sweep.dir={current.folder}"]
    return Call(current, todo, ended, [*for_launcher, *directory, text], launcher)


def _sweep_folder(argv: Sequence[str], planned: Sequence[Job], launcher: str, named: str | None) -> Sweep:
    """Return the sweep of a command: the latest one with the same command and jobs, or a new one."""
    command = tuple(argv)
    manifest = Manifest(
        id="",
        token=uuid.uuid4().hex,
        command=command,
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        results_dir=_results_dir(planned),
        launcher=launcher,
        jobs=tuple(planned),
    )
    if launch.rank() > 0:  # only rank 0 records the sweep
        folder = Path(tempfile.mkdtemp(prefix="kvbench-rank-"))
        return Sweep(folder, replace(manifest, id=folder.name))
    if named is not None:
        check_writable(named, "hydra.sweep.dir")
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        before = _sweep_of_command(folder, command)
    else:
        before = sweeps.newest(plan.SWEEPS, command)
        folder = before.folder if before is not None else plan.new_folder()
    if before is not None and _repeats(planned) and before.counts()["done"] == len(planned):
        before = None  # all was repeated: the same command repeats it once more
        folder = folder if named is not None else plan.new_folder()
    if before is not None and [(one.number, one.overrides) for one in before.manifest.jobs] == [
        (one.number, one.overrides) for one in planned
    ]:
        counts = before.counts()
        say(f"sweep {before.manifest.id}: continued; {', '.join(f'{n} {state}' for state, n in counts.items() if n)}")
        current = before
    else:
        folder = folder if named is not None or before is None else plan.new_folder()
        current = Sweep(folder, replace(manifest, id=folder.name))
        current.manifest.write(folder)
        say(
            f"sweep {current.name}: {sweeps.in_words(len(planned))}; "
            f"`python -m kvbench.report --sweep {current.name}` shows them"
        )
    with suppress(OSError):  # it only informs those who watch
        atomic.replace_file(current.folder / sweeps.DRIVER, (json.dumps(sweeps.here()) + "\n").encode())
    return current


def _repeats(planned: Sequence[Job]) -> bool:
    """Return True if a job repeats stored samples whenever it is started (``runtime.rerun=times`` or ``all``)."""
    return any(text in ("runtime.rerun=times", "runtime.rerun=all") for one in planned for text in one.overrides)


def _sweep_of_command(folder: Path, command: tuple[str, ...]) -> Sweep | None:
    """Return the sweep in `folder` if it was started with the same command; else None."""
    try:
        there = Sweep.open(folder)
    except KvbenchError:
        return None
    return there if there.manifest.command == command else None


def _results_dir(planned: Sequence[Job]) -> str:
    key = "runtime.results_dir="
    texts = [text.removeprefix(key).strip("'\"") for text in planned[0].overrides if text.startswith(key)]
    return texts[-1] if texts else "results/runs"


def _finished(current: Sweep, one: Job, extra: Path | None) -> Outcome | None:
    """Return the outcome of a job that an earlier call has finished; None if the job must run.

    It must run if its record or its run is missing, its run is another one now (its data or weights have changed), the
    code has changed, rows are missing, or the logger may have something to send.
    """
    outcome = plan.outcome(current.folder, one.number, current.manifest.token)
    metrics = (outcome or {}).get("metrics") or {}
    if outcome is None or outcome["status"] not in sweeps.FINAL or not metrics.get("run_dir"):
        return None
    from kvbench.cli.report_runs import marked
    from kvbench.results.identity import run_id
    from kvbench.results.store import RunStore
    from kvbench.runner.resolve import material

    try:
        checked = job.configuration(one.overrides, extra)
        config = dict(checked.plain)
        if checked.logger.name not in ("none", "csv") or checked.runtime.rerun or checked.runtime.retry:
            return None
        store = RunStore(checked.runtime.results_dir, run_id(material(checked)))
        now = store.metrics()
        asked = config["dataset"].get("limit") == ((store.config() or {}).get("dataset") or {}).get("limit")
        if now is None or store.run_id != metrics["run_id"] or not asked:
            return None
        current_metrics = marked(store, now, config)
    except KvbenchError:
        return None
    if current_metrics["status"] not in ("ok", "oom"):
        return None
    return {**outcome, "metrics": {**current_metrics, "run_dir": str(store.path)}, "before": True}


def conclude(call: Call, *, interrupted: bool = False) -> int:
    """Print the table of all jobs, a line per failed job, and how to go on; return the exit status.

    All jobs have ended, unless the user has interrupted the call.
    """
    folder, expected = call.sweep.folder, len(call.sweep.manifest.jobs)
    with suppress(OSError, ValueError):
        driver = folder / sweeps.DRIVER
        if json.loads(driver.read_text(encoding="utf-8")) == sweeps.here():  # another call may have continued the sweep
            driver.unlink()
    by_number = {outcome["number"]: outcome for outcome in plan.outcomes(folder, say)}
    by_number |= {outcome["number"]: outcome for outcome in call.ended} | unit.outcomes
    done = [by_number[number] for number in sorted(by_number)]
    rows = ranking.best_first([outcome["metrics"] for outcome in done if outcome.get("metrics")])
    if rows:
        show(tables.table_text(rows))
    failed = [outcome for outcome in done if outcome["status"] not in DONE]
    say(_count_line(done, expected))
    unwritten = _record_late(folder, call.sweep.manifest.token)
    if rows and launch.rank() == 0:
        _keep_table(folder, rows)
    if rows and "logger=wandb" in call.sweep.manifest.command:
        say(
            f"to send this table and its plots to W&B: python -m kvbench.publish --sweep {shlex.quote(call.sweep.name)}"
        )
    for outcome in failed:
        first = (outcome["message"] or outcome["status"]).splitlines()[0]
        say(f"job {outcome['number'] + 1} {outcome['status']}: {' '.join(outcome['overrides'])}: {first}")
    missing = expected - len(done)
    if missing and not interrupted:
        say(f"{missing} of {expected} jobs did not record an outcome in {folder}")
    if interrupted or missing or failed or unwritten:
        again = f"python -m kvbench --resume {shlex.quote(call.sweep.name)}"
        say(f"{'interrupted; ' if interrupted else ''}to run what is missing: {again} (or the same command again)")
    if interrupted:
        return INTERRUPTED
    return 1 if failed or missing or unwritten else 0


def _record_late(folder: Path, token: str) -> int:
    """Try again to write the records of this process's jobs that could not be written; return how many still cannot."""
    unwritten = 0
    for number, outcome in unit.outcomes.items():
        if launch.rank() == 0 and plan.outcome(folder, number, token) is None:
            try:
                plan.record(folder, number, outcome)
            except OSError:
                unwritten += 1
    return unwritten


def _keep_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        path = plan.keep_table(folder, tables.runs_markdown(rows), tables.runs_csv(rows))
        say(f"table: {path} and, as CSV, in the same folder")
    except OSError as error:
        say(f"the sweep's table cannot be written to {folder}: {error.strerror or error}")


def _count_line(done: Sequence[Outcome], expected: int) -> str:
    """Return a line with the number of jobs by status, and how many of them had been done before this call."""
    ended = Counter(outcome["status"] for outcome in done)
    before = sum(outcome["status"] == "ok" and outcome.get("before", False) for outcome in done)
    parts = [
        f"{ended[status]} {status}" + (f" ({before} of them were already done)" if status == "ok" and before else "")
        for status in STATUSES
        if ended[status]
    ]
    return f"{sweeps.in_words(expected)}: {', '.join(parts) or 'none has ended'}"
