"""The runs behind an item: commands, their ids, and their execution, each once and only where something is missing."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, DataError, KvbenchError, LengthError, ModelError
from kvbench.models.spec import ModelConfig, is_random
from kvbench.tasks.base import Task
from kvbench.util.schema import build

Launcher = Literal["local", "joblib"]


def given_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of overrides by key."""
    return {text.partition("=")[0]: text.partition("=")[2] for text in overrides}


@dataclass(frozen=True)
class Run:
    """One run of kvbench.

    Args:
        overrides: what is typed after ``python -m kvbench``.
        model, data: choices that the run needs; where one is unavailable, no further run with it is tried.
    """

    overrides: tuple[str, ...]
    model: str
    data: str

    @property
    def given(self) -> dict[str, str]:
        """The values by key."""
        return given_of(self.overrides)

    @property
    def command(self) -> str:
        """The command line."""
        return " ".join(["python -m kvbench", *self.overrides])


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run.

    Args:
        run: the run.
        id: its id; empty where it cannot be known (the data, which are part of it, are missing).
        status: status of the run's record; ``absent`` if weights, data or a package are missing; ``failed``.
        reason: message where there is no complete record.
        missing: the model or data set that is missing, with which no further run is tried: ``("data", choice)``.
    """

    run: Run
    id: str
    status: str
    reason: str = ""
    missing: tuple[str, str] | None = None


def run_of(setting: str, model: str, data: Sequence[str], plan: Any, options: Sequence[str] = ()) -> Run:
    """Return the run of a setting (:mod:`kvbench.config.setting`), as it would be typed.

    `data` are overrides of the data set, of which the first is ``dataset=CHOICE``; `options` are further ones; `plan`
    is the command line's :class:`~experiments.data.Plan`.
    """
    where = ["runtime.rerun=true"] if plan.rerun else []
    where += [] if plan.device == "auto" else [f"runtime.device={plan.device}"]
    # on every machine as on a CPU: 16 bits would change most of the dequantized weights
    where += ["runtime.arithmetic=float32"] if plan.data == "real" else []
    if plan.runs != Path("results/runs"):
        where.append(f"runtime.results_dir={plan.runs}")
    texts = (*parse_setting(setting).overrides(), f"model={model}", *data, *options, *where)
    return Run(texts, model, data[0].partition("=")[2])


@cache
def composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of a run as the main command line composes it.

    Raises:
        ConfigError: an override is wrong.
    """
    plain: dict[str, Any] = _composer().plain([*overrides, "logger=none"])
    return plain


@cache
def _composer() -> Any:
    from kvbench.cli.compose import Composer

    return Composer()


#: (kind, choice) -> reason: models and data sets that have been found missing by this process
_absent: dict[tuple[str, str], str] = {}


@cache
def identify(run: Run) -> tuple[str, str]:
    """Return the id of a run and an empty text; or an empty id and the reason why it cannot be known."""
    if ("data", run.data) in _absent:
        return "", _absent["data", run.data]  # the records are part of the id
    from kvbench.config.run_config import checked_config
    from kvbench.results.identity import run_id
    from kvbench.runner.resolve import material

    try:
        return run_id(material(checked_config(composed(run.overrides)))), ""
    except KvbenchError as error:
        return "", str(error)


def bound_task(run: Run) -> Task:
    """Return the data set of a run, with its model's tokenizer where it needs one."""
    from kvbench.config.run_config import checked_config

    config = checked_config(composed(run.overrides))
    if config.task.needs_tokenizer:
        from kvbench.models.load import load_tokenizer

        config.task.bind(load_tokenizer(config.model))
    return config.task


@cache
def unfilled(overrides: tuple[str, ...]) -> str:
    """Return that no text of a data set fills its prompts; empty if one does, or if that cannot be known here.

    `overrides` are those of the model and the data, which the runs of several settings share.
    """
    try:
        next(iter(bound_task(Run(overrides, "", "")).samples()), None)
    except LengthError as error:
        return str(error).splitlines()[0].removesuffix(".")
    except KvbenchError:  # no data or no tokenizer
        pass
    return ""


#: key of the error for a missing calibration, and the generated texts to calibrate with
CALIBRATION, TEXTS = "method.calibration", ("mini", "python")
#: options of a calibration of random weights, of which any few tokens will do; the dtype is that of points
RANDOM = ("--random", "--sequences", "2", "--length", "256", "--no-fisher", "--dtype", "bfloat16")
#: reason why a point of a large model has no run on a machine without a GPU
NO_GPU = "measured only on a GPU, but this machine has none, and results/h200/papers does not contain this point"


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, without importing torch."""
    return Path("/dev/nvidiactl").exists()


def execute(run: Run, threads: int | None = None) -> RunOutcome:
    """Do what is missing of a run in this process, with so many of torch's threads (None: unchanged)."""
    from kvbench.runner.run import answer_run

    for key in (("model", run.model), ("data", run.data)):
        if key in _absent:
            return RunOutcome(run, "", "absent", _absent[key])
    if any(text.startswith("model.weights=random") for text in run.overrides) and not has_gpu():
        return RunOutcome(run, "", "absent", NO_GPU)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        config = composed(run.overrides)
        calibrate(config, run)
        metrics = answer_run(config)
    except (ModelError, DataError) as error:
        # an encoder that is missing is a ModelError too, but concerns this setting only
        kind: tuple[str, str] | None = ("data", run.data)
        if isinstance(error, ModelError):
            kind = ("model", run.model) if f"model {run.model}" in str(error).splitlines()[0] else None
        if kind is not None:
            _absent[kind] = str(error)
        return RunOutcome(run, "", "absent", str(error), kind)
    except ConfigError as error:  # a combination that kvbench refuses, such as a method without its calibration
        return RunOutcome(run, "", "absent", str(error))
    except KvbenchError as error:
        return RunOutcome(run, "", "failed", str(error))
    except Exception as error:  # one run that fails must not end the others
        return RunOutcome(run, "", "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    message = "" if metrics["status"] in ("ok", "older", "oom") else str(metrics.get("error"))
    return RunOutcome(run, Path(metrics["run_dir"]).name, metrics["status"], message)


def calibrate(config: Mapping[str, Any], run: Run) -> None:
    """Make the calibration of method=kvquant where it is missing, on generated texts (tiny brings its own).

    Raises:
        ModelError: the model's weights are missing.
    """
    if "method=kvquant" not in run.overrides:
        return
    from filelock import FileLock

    from kvbench.calibration.file import FOLDER
    from kvbench.cli.calibrate import main
    from kvbench.config.run_config import checked_config
    from kvbench.models.locate import locate
    from kvbench.runner.resolve import material

    try:
        material(checked_config(config))  # the calibration is part of a run's identity
        return
    except ConfigError as error:
        if error.key != CALIBRATION:
            raise
    given = run.given
    random = is_random(given.get("model.weights"))
    if not random:
        locate(build(ModelConfig, config["model"], "model"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f".{run.model.replace('/', '--')}.lock"):
        device = given.get("runtime.device", "auto")
        main(["--model", run.model, "--text", *TEXTS, "--device", device, *(RANDOM if random else ())])


def execute_all(runs: Sequence[Run], launcher: Launcher = "local", jobs: int = -1) -> Iterator[RunOutcome]:
    """Do what is missing of each run, once, and yield its outcome: in order, or with ``joblib`` as the runs end.

    ``joblib`` has so many worker processes (-1: one for each processor), of one thread each.
    """
    runs = list(dict.fromkeys(runs))
    if launcher == "local" or len(runs) < 2:
        from kvbench.models import shared

        try:
            with shared.sharing():  # the runs of an item come model by model
                yield from map(execute, runs)
        finally:
            shared.free()
        return
    from joblib import Parallel, delayed

    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the workers
    parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", pre_dispatch="all", batch_size=1)
    for outcome in parallel(delayed(execute)(run, 1) for run in runs):
        if outcome.missing is not None:  # found by a worker
            _absent[outcome.missing] = outcome.reason
        yield outcome


def samples(folder: Path, run_id: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of a run by sample id, warm-up samples left out; empty where there is no such run."""
    from kvbench.results.store import RunStore

    rows = RunStore(folder, run_id).samples().rows
    return {name: row for name, row in rows.items() if not row.get("warm_up")}
