"""Analyses of attention behind items: made once for each model, data and settings, and kept beside the runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.data import Plan, data_overrides
from experiments.item import Column, Model
from experiments.real.files import file_notes
from experiments.runs import composed, run_of
from kvbench.analysis.outcome import Outcome, Shape
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.config.setting import parse_setting
from kvbench.errors import KvbenchError
from kvbench.runner.resolve import material
from kvbench.tasks.base import Sample
from kvbench.util.normal_form import normal_form
from kvbench.util.progress import say

#: packages whose code an analysis depends on
CODE = ("analysis", "attention", "cache", "calibration", "methods", "models", "quantizers", "retrieval", "tasks")
#: prompts after which an unfinished analysis is written, so that a killed command goes on there
SAVED = 5
#: with ``--data mini`` all bundled tasks together
MINI = Column("mini", "mini")


@dataclass(frozen=True)
class Analysis:
    """An analysis, or the reason why there is none.

    Args:
        outcome: its rows and arrays; None: see `reason`.
        id: name of its folder below the runs.
        reason: why there is none.
    """

    outcome: Outcome | None
    id: str = ""
    reason: str = ""


def analysis(
    model: Model,
    data: Sequence[Column],
    settings: Mapping[str, str],
    plan: Plan,
    *,
    prompts: int,
    steps: int,
) -> Analysis:
    """Return the analysis of a model: the stored one if it exists, else make it.

    Args:
        data: data sets; with ``--data mini`` the bundled tasks take their place.
        settings: name of a row -> its setting.
        prompts: prompts per data set, unless the plan has a limit.
        steps: decode steps of each prompt; ``--max-new-tokens`` shortens them.
    """
    steps = min(steps, plan.max_new_tokens or steps)
    limited = plan if plan.limit is not None else replace(plan, limit=prompts)
    try:
        chosen = [MINI] if plan.data == "mini" else data
        configs = [_config(model, column, limited) for column in chosen]
        return _made(configs, dict(settings), limited, steps)
    except KvbenchError as error:
        return Analysis(None, reason=str(error).split("\n")[0])


def notes(item: Any, plan: Plan, *analyses: Analysis) -> list[str]:
    """Return what an item shows in place of the paper's models and data, and how many prompts."""
    lines = []
    if plan.models:
        lines.append(f"Models here: {', '.join(plan.models)}, in place of {', '.join(m.title for m in item.models)}.")
    if plan.data == "mini":
        lines.append("Data here: the bundled tasks of dataset=mini in place of the paper's data sets.")
    if plan.data == "real":
        lines += file_notes(item.options["data"], plan)
    for one in analyses:
        if one.outcome is not None:
            heads = one.outcome.shape.layers * one.outcome.shape.heads
            tokens = sorted(row["prompt_tokens"] for row in one.outcome.prompts)
            steps = sorted(row["steps"] for row in one.outcome.prompts)
            count = f"{len(tokens)} prompt{'s' if len(tokens) > 1 else ''}"
            lines.append(
                f"{one.outcome.model}: {count} of {_range(tokens)} tokens, {_range(steps)} decode steps; the largest "
                f"possible L1 error is {2 * heads} ({heads} heads in all layers)."
            )
    return list(dict.fromkeys(lines))


def _range(numbers: Sequence[int]) -> str:
    """Return sorted numbers as the range that they span: ``8``, or ``318 to 512``."""
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def _config(model: Model, column: Column, plan: Plan) -> tuple[RunConfig, str]:
    """Return the checked configuration of a data set with fp16, and what identifies it."""
    run = run_of("fp16", model.preset, data_overrides(column, plan, model), plan)
    checked = checked_config(composed(run.overrides))
    return checked, json.dumps([material(checked)["setting"], plan.limit], sort_keys=True)


def _made(configs: list[tuple[RunConfig, str]], settings: dict[str, str], plan: Plan, steps: int) -> Analysis:
    parts = [settings, steps, code_digest(), *(text for _, text in configs)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    folder = plan.runs / f"attention-{digest}"
    if not (folder / "about.json").exists():
        if plan.fold_only:
            return Analysis(None, reason="not run")
        _make_analysis(configs, settings, steps, folder)
    return Analysis(Outcome.load(folder), folder.name)


def _make_analysis(configs: list[tuple[RunConfig, str]], settings: dict[str, str], steps: int, folder: Path) -> None:
    from kvbench.analysis.analyse import analyse, texts
    from kvbench.analysis.command import samples
    from kvbench.analysis.observe import Options
    from kvbench.models.load import load_model
    from kvbench.models.locate import locate

    config = configs[0][0]
    methods = {}
    for name, text in settings.items():
        methods[name] = parse_setting(text).load()
        methods[name].check(head_dim=config.model.head_dim(), max_length=config.model.max_length)
        methods[name].prepare(config.model)
        methods[name].ready()
    locate(config.model)
    loaded = load_model(config.model, config.runtime)
    drawn: list[Sample] = [sample for one, _ in configs for sample in samples(one.task, loaded.tokenizer)]
    prompts = texts(drawn, loaded, config.model, steps)
    half = folder.with_name(f"{folder.name}.partial")
    shape = Shape(loaded.architecture.layers, loaded.architecture.heads)
    chosen = Options(steps=steps, positions=True)
    outcome = Outcome(loaded.name, shape, chosen.bins, tuple(methods))
    if (half / "about.json").exists():  # of a command that was killed
        outcome = Outcome.load(half)

    def report(name: str) -> None:
        done = len(outcome.prompts)
        if done % SAVED == 0 and done < len(prompts):
            outcome.save(half)
            say(f"attention of {loaded.name}: {done} of {len(prompts)} prompts")

    analyse(loaded, prompts, methods, chosen, report, outcome)
    about = {"settings_text": settings, "steps": steps, "code": code_digest(), "origin": origin_of(configs)}
    outcome.save(folder, about)
    shutil.rmtree(half, ignore_errors=True)


def origin_of(configs: Sequence[tuple[RunConfig, str]]) -> dict[str, Any]:
    """Return repository, commit and checksums of the model (None if it is local) and of all data sets from the hub."""
    from kvbench.runner import origins

    parts = [origins.of(config) for config, _ in configs]
    model = next((part["model"] for part in parts if "model" in part), None)
    return {"model": model, "data": [entry for part in parts for entry in part.get("data", ())]}


@cache
def code_digest() -> str:
    """Return a digest of the code that an analysis depends on; comments and docstrings do not affect it."""
    import kvbench

    digest = hashlib.sha256()
    for package in CODE:
        for path in sorted((Path(kvbench.__file__).parent / package).rglob("*.py")):
            digest.update(normal_form(path.read_bytes()).encode())
    return digest.hexdigest()[:12]
