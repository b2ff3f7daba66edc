"""The command ``python -m kvbench``: checks the command line, starts the jobs through Hydra and prints a table."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli import job, settings
from kvbench.cli.arguments import parse_arguments
from kvbench.cli.overrides import explain, template
from kvbench.errors import ConfigError, KvbenchError, disk_message
from kvbench.parallel import launch
from kvbench.results.sweeps import SWEEPS, named_sweep, read_manifest
from kvbench.util.door import INTERRUPTED
from kvbench.util.progress import say, show, silence


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
        say(f"error: {disk_message(error)}")
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
    arguments = parse_arguments(argv)
    if arguments.resume is not None:
        return _main(_resumed(arguments.resume))
    extra = Path(arguments.config_dir).absolute() if arguments.config_dir is not None else None
    composer = job.composer_of(extra)
    if extra is not None:  # the folder may contain Python modules of external methods next to the folders of groups
        sys.path.insert(0, str(extra))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(extra), os.environ.get("PYTHONPATH")]))
    if arguments.help:
        from kvbench.cli.choice import choice_help
        from kvbench.cli.usage import folded, help_text

        show(folded(choice_help(arguments.overrides, extra) or help_text(extra)))
        return 0
    # the default, which Hydra does not accept as a choice
    overrides = [template(text) for text in arguments.overrides if text != "experiment=null"]
    if arguments.hydra_help:
        from kvbench.cli.multirun import by_hydra

        return by_hydra(arguments.argv(overrides))
    if arguments.multirun:
        _check_launcher(overrides)
    jobs = composer.check(overrides, arguments.multirun, here=not (arguments.cfg or arguments.info))
    if arguments.cfg == "job" and not arguments.info:
        show(composer.shown(jobs[0], arguments.package, arguments.resolve))
        return 0
    if arguments.multirun and not arguments.info:
        from kvbench.cli.multirun import run_sweep

        return run_sweep(argv, arguments, composer, overrides)
    if arguments.cfg or arguments.info:
        from kvbench.cli.multirun import by_hydra

        return by_hydra(arguments.argv(settings.variants(overrides, arguments.multirun)[0]))
    return _conclude(job.outcome_of_job(lambda: composer.configuration(jobs[0])))


def _resumed(name: str) -> list[str]:
    """Return the command line of a sweep that is to be continued.

    Raises:
        KvbenchError: there is no such sweep, or its command would start another sweep in the current folder.
    """
    folder = named_sweep(SWEEPS, name)
    command = list(read_manifest(folder).command)
    chosen = [Path(text.partition("=")[2].strip("'\"")) for text in command if text.startswith("hydra.sweep.dir=")]
    if folder.absolute() != (chosen[-1] if chosen else SWEEPS / folder.name).absolute():
        raise ConfigError(
            "--resume",
            name,
            "was started in another working folder, to which the paths in its command refer",
            hint="change to that folder with cd, and run the same command there",
        )
    return command


def _conclude(outcome: job.Outcome) -> int:
    """Print the table of a single run and return the exit status."""
    from kvbench.results import tables
    from kvbench.results.store import DONE

    if outcome.get("metrics"):
        show(tables.table_text([outcome["metrics"]]))
    return 0 if outcome["status"] in DONE else int(outcome.get("exit_code", 1))
