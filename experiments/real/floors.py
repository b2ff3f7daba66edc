"""The floor of each data set: what an empty answer and another sample's answer score, beside fp16.

A set on which fp16 is not above both says nothing about a method: its scores are left out of verdicts. Where too few
rows were run to tell, the floor is not known, and scores are judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.data import Plan, columns_of, data_overrides, runs_here
from experiments.fold.figures import standard_error
from experiments.item import Column, Grid, Model
from experiments.measured import Folded, keep_measured_table
from experiments.place import choice
from experiments.real.floor_file import ABOVE, AT, FILE, UNKNOWN, model_digest, read_floors, set_name
from experiments.real.fold import rounded
from experiments.registry import items
from experiments.runs import Run, bound_task, execute_all, identify, run_of, samples
from experiments.stored import as_json, markdown_table
from kvbench.errors import KvbenchError
from kvbench.metrics import intervals
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import AskQuestions

#: fewest rows with which a set is called above its floor
FEWEST = 5


def scored_columns(plan: Plan, model: Model) -> Iterator[tuple[str, Column]]:
    """Yield a name and a column for each data set, or task of one, that some item scores."""
    seen = set()
    for item in items().values():
        for column in columns_of(item, plan) if isinstance(item, Grid) else ():
            name = set_name(column)
            scored = column.figure == "score" and not runs_here(column, plan, model)
            if scored and name not in seen:
                seen.add(name)
                yield name, column
    from experiments.real.stages import RETRIEVAL

    options = ("dataset.lengths=[2048]",)
    yield f"ruler/{RETRIEVAL}@2048", Column(RETRIEVAL, "ruler_offline", task=RETRIEVAL, options=options)


def make_floors(arguments: argparse.Namespace) -> int:
    """Run fp16 on every data set, write ``floors.json`` and its table, and return the exit status."""
    from experiments.real.plan import PARTS, plan_of, size_of

    part = next(part for part in PARTS if part.stage == "floors")
    plan = plan_of(arguments, arguments.prompts or size_of(part, arguments))
    model = Model(arguments.model)
    runs = {
        name: run_of("fp16", model.preset, data_overrides(column, plan, model), plan)
        for name, column in scored_columns(plan, model)
    }
    if not arguments.fold_only:
        jobs = arguments.jobs
        for outcome in execute_all(list(runs.values()), "joblib" if jobs > 1 else "local", jobs):
            print(f"{outcome.status} {outcome.run.command} {outcome.reason.splitlines()[0] if outcome.reason else ''}")
    path = arguments.out / "floors" / FILE
    old = read_floors(path) if path.exists() else {}
    here = [{"name": name, **floor_of(run, plan)} for name, run in runs.items()]
    digest = model_digest(arguments.model)
    own = (old.get("model"), old.get("digest")) == (arguments.model, digest) and not arguments.replace
    lines = with_stored(here, old["lines"] if own else [])
    limits = [limit for limit in (plan.limit, own and old.get("limit")) if limit]
    whole = {"model": arguments.model, "digest": digest, "limit": max(limits, default=None), "lines": lines}
    folded = Folded(floors_markdown(whole), {FILE: as_json(whole)}, row_counts(whole))

    def before(folder: Path) -> Mapping[str, int] | None:
        return row_counts(read_floors(folder / FILE)) if (folder / FILE).exists() else None

    return keep_measured_table(folded, path.parent, choice(arguments), before, arguments.model)


def row_counts(whole: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows behind each floor of a file."""
    return {line["name"]: line["n"] for line in whole["lines"]}


def with_stored(here: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the floors of the runs here, and in place of those with fewer rows the stored ones of the same model."""
    by_name = {line["name"]: line for line in old}
    return [max(line, by_name.get(line["name"], line), key=lambda one: one["n"]) for line in here]


def floor_of(run: Run, plan: Plan) -> dict[str, Any]:
    """Return what fp16, an empty answer and another sample's answer score on the samples of a run, and which it is."""
    run_name, reason = identify(run)
    rows = samples(plan.runs, run_name) if run_name else {}
    if not rows:
        return {"n": 0, "verdict": UNKNOWN, "reason": (reason or "not run").splitlines()[0]}
    try:
        task = bound_task(run)
        asked = [sample for sample in task.samples() if sample.id in rows]
    except KvbenchError as problem:
        return {"n": 0, "verdict": UNKNOWN, "reason": str(problem).splitlines()[0]}
    own = [float(rows[sample.id]["scores"]["score"]) for sample in asked]
    empty, other = floor_scores(task, asked)
    devices = sorted({device for row in rows.values() if (device := (row.get("measured") or {}).get("device"))})
    return {"n": len(own), "run": run_name, "devices": devices, **figures(own, empty, other)}


def floor_scores(task: Task, asked: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return the scores of empty answers, and of the reference answers of other samples.

    Sample i of n gets the answer of sample i + n/2, so that every answer is given once.
    """
    empty, other = [], []
    for number, sample in enumerate(asked):
        another = asked[(number + max(1, len(asked) // 2)) % len(asked)]
        empty.append(score(task, sample, ""))
        other.append(score(task, sample, answer_of(another)))
    return empty, other


def answer_of(sample: Sample) -> str:
    """Return the first reference answer of a sample, with all parts of answers that have several."""
    return " ".join(sample.answers) if sample.meta.get("match") == "all" else sample.answers[0]


def score(task: Task, sample: Sample, answer: str) -> float:
    """Return the score of one answer; of a sample with several questions, of that answer to each of them."""
    if isinstance(sample.work, AskQuestions):
        return task.score_questions(sample, [answer] * len(sample.work.questions))["score"]
    return task.score(sample, answer)["score"]


def figures(own: Sequence[float], empty: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the three means, and the verdict: above where the gap to the higher floor excludes 0."""
    count = len(own)
    means = {"fp16": own, "empty": empty, "random": other}
    floor = empty if sum(empty) > sum(other) else other
    gaps = [a - b for a, b in zip(own, floor, strict=True)]
    mean = sum(gaps) / count
    interval = intervals.of_moments(mean, standard_error(gaps), count)
    low, high = interval or (mean, mean)
    verdict = UNKNOWN if count < FEWEST else ABOVE if low > 0 else AT
    return {
        **{name: rounded(sum(values) / count) for name, values in means.items()},
        "gap": {"value": rounded(mean), "low": rounded(low), "high": rounded(high)},
        "verdict": verdict,
    }


def floors_markdown(whole: Mapping[str, Any]) -> str:
    """Return the table of floors, in percent."""
    body = []
    for line in whole["lines"]:
        if not line["n"]:
            body.append([line["name"], "0", "-", "-", "-", "-", f"{line['verdict']}: {line['reason']}"])
            continue
        scores = [f"{100 * line[name]:.1f}" for name in ("fp16", "empty", "random")]
        gap = line["gap"]
        shown = f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
        body.append([line["name"], str(line["n"]), *scores, shown, line["verdict"]])
    head = ["data set", "n", "fp16", "empty answer", "another's answer", "fp16 less the higher", "verdict"]
    text = "\n".join(markdown_table(head, body))
    return f"Scores in percent; the gap has its 95 % interval over samples. {RULE}\n\n{text}\n\n{devices_text(whole)}\n"


def devices_text(whole: Mapping[str, Any]) -> str:
    """Return the runs behind the floors, and their devices; of those of older files neither is known."""
    by_device: dict[str, list[str]] = {}
    for line in whole["lines"]:
        if line["n"]:
            device = ", ".join(line.get("devices") or ["an unknown machine, by runs that were not noted"])
            text = f"{line['name']} ({line['run']})" if line.get("run") else line["name"]
            by_device.setdefault(device, []).append(text)
    return "\n".join(f"- Measured on {device}: {', '.join(names)}." for device, names in by_device.items())


RULE = (
    f"A set is above its floor where that interval lies above 0, with {FEWEST} rows or more; another's answer is the "
    "reference of another row of the same set."
)
