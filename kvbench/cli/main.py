"""The command ``python -m kvbench``: checks the command line, starts the jobs through Hydra and prints a table."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli import settings, sweep
from kvbench.cli.arguments import parse as arguments_of
from kvbench.cli.choice_help import choice_help
from kvbench.cli.compose import Composer, run_config
from kvbench.cli.model_choice import filled
from kvbench.cli.overrides import as_sweeps, explain
from kvbench.cli.parser import help_as_text
from kvbench.cli.usage import help_text
from kvbench.errors import ConfigError, KvbenchError
from kvbench.parallel import launch
from kvbench.results.load import SIDE_BY_SIDE
from kvbench.util.confdir import conf_dir, groups
from kvbench.util.progress import say, show, silence
from kvbench.util.requirements import check_writable

#: exit status of an interrupted run: 128 + SIGINT, as in shells
INTERRUPTED = 130
#: environment variable with the number of jobs in a sweep, for messages; inherited by the workers of a launcher
JOBS = "KVBENCH_SWEEP_JOBS"

#: outcomes of the jobs that ran in this process
_outcomes: list[dict[str, Any]] = []


def main(argv: Sequence[str]) -> int:
    """Run ``python -m kvbench`` with the arguments `argv`, and return the exit status.

    Errors that a user can fix are printed to standard error, not raised.
    """
    try:
        if launch.rank() > 0:  # one of several processes: only rank 0 prints
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        _check_place()
        status = _main(list(argv))
        sys.stdout.flush()
        return _left(status)
    except BrokenPipeError:  # for example `... | head`; results are on disk
        with suppress(OSError, ValueError):
            silence(sys.stdout)
        return _left(0)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        say(
            f"error: {place}{error.strerror or error}.\n  hint: check the folder's permissions, the "
            "free disk space and the length of the name"
        )
        return _left(1)
    except KvbenchError as error:
        say(f"error: {error}")
        return _left(error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        refusal = explain(error, argv)
        say(f"error: {refusal}")
        return _left(refusal.exit_code)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to resume")
        return _left(INTERRUPTED)


def _check_launcher(overrides: Sequence[str]) -> None:
    """Raise ConfigError for launcher=submitit on a machine without SLURM, where submitit fails with a traceback."""
    if "launcher=submitit" in overrides and shutil.which("srun") is None:
        raise ConfigError(
            "launcher",
            "submitit",
            "passes the jobs to SLURM, which this machine does not have (no srun)",
            hint="run the command on the cluster's login node, or set launcher=local or launcher=joblib",
        )


def _left(status: int) -> int:
    """Leave the team of a tensor-parallel run and return `status`; if a rank has failed, end this process at once."""
    if launch.launched() and "kvbench.parallel.team" in sys.modules:
        from kvbench.parallel.team import current, leave

        team = current()
        if team is not None and team.broken:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status or 1)  # threads that wait for the failed rank would keep the interpreter from exiting
        leave()
    return status


def _check_place() -> None:
    """Raise ConfigError if the current folder no longer exists, since the paths of a run are relative to it."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            "current folder", None, "was removed or cannot be read", hint="change to another folder with cd"
        ) from error


def _main(argv: list[str]) -> int:
    if "--version" in argv:
        import kvbench

        show(f"kvbench {kvbench.__version__}")
        return 0
    arguments = arguments_of(argv)
    extra = Path(arguments.config_dir).absolute() if arguments.config_dir is not None else None
    composer = Composer(extra)
    if extra is not None:  # the folder may contain Python modules of external methods next to the folders of groups
        sys.path.insert(0, str(extra))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(extra), os.environ.get("PYTHONPATH")]))
    if arguments.help:
        show(choice_help(arguments.overrides, extra) or help_text(extra))
        return 0
    # the default, which Hydra does not accept as a choice
    overrides = [text for text in arguments.overrides if text != "experiment=null"]
    if arguments.hydra_help:
        return _hydra(arguments.argv(overrides))
    multirun = arguments.multirun
    if multirun:
        _check_launcher(overrides)
    jobs = composer.check(overrides, multirun, here=not (arguments.cfg or arguments.info))
    if arguments.cfg == "job" and not arguments.info:
        show(composer.shown(jobs[0], arguments.package, arguments.resolve))
        return 0
    overrides = settings.for_hydra(overrides, multirun)
    if arguments.cfg or arguments.info:
        return _hydra(arguments.argv(overrides))
    folder = None
    if multirun:
        os.environ[JOBS] = str(len(jobs))
        os.environ[SIDE_BY_SIDE] = "1" if "launcher=joblib" in overrides else ""
        named = [text.split("=", 1)[1].strip("'\"") for text in overrides if text.startswith("hydra.sweep.dir=")]
        if named:
            check_writable(named[-1], "hydra.sweep.dir")
            Path(named[-1]).mkdir(parents=True, exist_ok=True)
        sweep.begin()
        if launch.rank() > 0:  # only rank 0 records the sweep
            folder = Path(tempfile.mkdtemp(prefix="kvbench-rank-"))
        else:
            folder = Path(named[-1]) if named else sweep.new_folder()
        overrides = as_sweeps(overrides, groups())
        overrides = overrides if named else [*overrides, f"hydra.sweep.dir={folder}"]
    _outcomes.clear()
    _hydra(arguments.argv(overrides))
    done = sweep.outcomes(folder, say) if folder else list(_outcomes)
    return _conclude(done, expected=len(jobs), folder=folder)


def run_job(config: DictConfig) -> str:
    """Run one job, record its outcome for the final table, and return its status: ``ok``, ``oom`` or ``error``.

    Hydra calls this function once per job. Errors are printed and recorded; only an interruption raises an exception.

    Args:
        config: the configuration as composed by Hydra.
    """
    job = HydraConfig.get()
    multirun = job.mode == RunMode.MULTIRUN
    number = int(job.job.num) if multirun else 0
    texts = [text for text in job.overrides.task if not text.startswith("hydra.")]
    overrides, spelled = settings.spelled_out(texts, config.get(settings.KEY))
    if multirun:
        say(f"\njob {number + 1}/{os.environ.get(JOBS, '?')}: {' '.join(overrides)}")
    outcome = _run(config, job, spelled) | {"overrides": overrides, "number": number}
    _outcomes.append(outcome)
    if multirun:
        sweep.record(Path(job.sweep.dir), number, outcome)
    status: str = outcome["status"]
    return status


def _composed(config: DictConfig, job: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a job as plain data, with the name of the method's preset in ``method.preset``.

    Args:
        config: the configuration as composed by Hydra; in a sweep over settings, it has a key `setting`.
        job: Hydra's configuration of the job.
        texts: the job's overrides, with the setting replaced by ``method=``, ``quantizer=`` and ``method.KEY=``.

    Raises:
        ConfigError: a checkpoint's config.json cannot be read, or a value is missing.
    """
    folders = [Path(source.path) for source in job.runtime.config_sources if source.provider == "command-line"]
    extra, preset = next(iter(folders), None), job.runtime.choices.get("method")
    if settings.KEY in config:
        preset = next(text.partition("=")[2] for text in texts if text.startswith("method="))
        config = Composer(extra).compose(texts)
    else:
        filled(config, job.runtime.choices.get("model"), texts, extra)
    plain = run_config(config)
    if preset and isinstance(plain.get("method"), dict):
        plain["method"] = {**plain["method"], "preset": preset}
    return plain


def _run(config: DictConfig, job: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Run one job (arguments as in :func:`_composed`) and return its outcome; errors become its message."""
    import traceback

    began, plain = time.time(), None
    try:
        plain = _composed(config, job, texts)
        from kvbench.runner.run import run

        metrics = run(plain)
    except KvbenchError as error:
        say(f"error: {error}")
        return _failed(job, plain, str(error), error.exit_code)
    except Exception as error:  # a bug in one method must not end a sweep
        traceback.print_exc()
        return _failed(job, plain, f"{type(error).__name__}: {error}", 1)
    outcome = {"status": metrics["status"], "message": metrics.get("error") or ""}
    if "rank" in metrics:  # not rank 0 of several processes
        return outcome
    outcome["metrics"] = metrics
    return outcome | {"before": _untouched(metrics, began)}


def _failed(job: Any, plain: dict[str, Any] | None, message: str, exit_code: int) -> dict[str, Any]:
    """Return the outcome of a job that failed; in a sweep with ``metrics`` for a row, if it has a configuration."""
    outcome = {"status": "error", "message": message, "exit_code": exit_code}
    if job.mode != RunMode.MULTIRUN or plain is None:
        return outcome
    from kvbench.results.ranking import failed

    return outcome | {"metrics": failed(plain, message)}


def _untouched(metrics: Mapping[str, Any], began: float) -> bool:
    """Return True if no sample of a run was stored after the time `began`."""
    try:
        return os.stat(Path(metrics["run_dir"]) / "samples.jsonl").st_mtime < began
    except (KeyError, OSError):
        return False


def _conclude(done: Sequence[dict[str, Any]], expected: int, folder: Path | None) -> int:
    """Print the table of all jobs and, for a sweep, a line per failed job; return the exit status.

    Args:
        done: outcomes of the jobs.
        expected: number of jobs.
        folder: folder of the sweep's record; None for a single run.
    """
    from kvbench.results import ranking, tables
    from kvbench.results.store import DONE

    rows = [outcome["metrics"] for outcome in done if outcome.get("metrics")]
    rows = ranking.best_first(rows) if folder else rows
    if rows:
        show(tables.summary(rows))
    failed = [outcome for outcome in done if outcome["status"] not in DONE]
    if folder:
        say(_count(done, expected))
    if folder and rows and launch.rank() == 0:
        try:
            say(
                f"table: {sweep.keep_table(folder, tables.markdown(rows), tables.to_csv(rows))} and, as "
                "CSV, in the same folder"
            )
        except OSError as error:
            say(f"the sweep's table cannot be written to {folder}: {error.strerror or error}")
    for outcome in failed if folder else ():
        first = (outcome["message"] or outcome["status"]).splitlines()[0]
        say(f"job {outcome['number'] + 1} {outcome['status']}: {' '.join(outcome['overrides'])}: {first}")
    if len(done) < expected:
        say(f"{expected - len(done)} of {expected} jobs did not record an outcome in {folder}")
    if not failed and len(done) == expected:
        return 0
    codes = {outcome.get("exit_code", 1) for outcome in failed}
    return codes.pop() if len(codes) == 1 and not folder else 1


def _count(done: Sequence[dict[str, Any]], expected: int) -> str:
    """Return a line with the number of jobs by status, and how many of them were complete before."""
    from kvbench.results.store import STATUSES

    ended = Counter(outcome["status"] for outcome in done)
    before = sum(outcome["status"] == "ok" and outcome.get("before", False) for outcome in done)
    parts = [
        f"{ended[status]} {status}" + (f" ({before} of them were already done)" if status == "ok" and before else "")
        for status in STATUSES
        if ended[status]
    ]
    return f"{expected} jobs: {', '.join(parts)}"


def _hydra(argv: Sequence[str]) -> int:
    """Let Hydra parse `argv` (through ``sys.argv``), compose configurations and launch jobs; return 0."""
    original = sys.argv
    sys.argv = [original[0], *argv]
    try:
        with help_as_text():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run_job)()
    finally:
        sys.argv = original
    return 0
