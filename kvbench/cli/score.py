"""``python -m kvbench.score``: scores outputs of other programs by the rules of LongBench and GSM8K.

A file contains one JSON object per line: for LongBench in its own form (``pred``, ``answers``, ``all_classes``,
``length``), for GSM8K with a response and an answer under any of the names in :data:`RESPONSES` and :data:`ANSWERS`,
which include those in sample logs of lm-evaluation-harness. Only reads files; does not import torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import DataError, KvbenchError, nearest
from kvbench.metrics import gsm8k, longbench
from kvbench.results.aggregate import mean_error
from kvbench.results.samples import write_atomically
from kvbench.tasks import data
from kvbench.tasks.data import Found, Record
from kvbench.tasks.longbench import EXTENDED
from kvbench.tasks.records import COUNT, FILLED_TEXT, TEXT, TEXTS, TEXTS_OR_NULL
from kvbench.util import table
from kvbench.util.door import reporting
from kvbench.util.requirements import check_writable, exists
from kvbench.util.table import Cell

#: accepted keys for the response of the model, and for the reference answer
RESPONSES = ("pred", "response", "prediction", "model_output", "output", "resps")
ANSWERS = ("answers", "answer", "target", "ground_truth", "reference")

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_GSM8K = ("gsm8k", "gsm8k_logquant")


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.score`` and return the exit status; print errors to standard error."""
    arguments = _score_parser().parse_args(argv)
    if arguments.output is not None:
        check_writable(str(arguments.output), "--output", file=True)
    scored, skipped = score_path(arguments.path, arguments.task)
    report = {"scores": scored, **_overall(scored), "skipped": skipped}
    if arguments.output:
        write_atomically(arguments.output, (json.dumps(report, indent=2) + "\n").encode())
    if arguments.format == "json":
        print(json.dumps(report, indent=2))
    elif arguments.format == "markdown":
        print(_score_markdown(report), end="")
    else:
        _print(report)
    return 0


def score_path(path: Path, task: str | None = None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Score the model outputs in a file, or in all files of a folder that are named after tasks.

    Args:
        path: a .jsonl or .json file, optionally compressed (.gz), or a folder of such files.
        task: task of the outputs (``qasper``, ``qasper_e``, ``gsm8k``, ...). With a folder, only the file named after
            this task is scored. None: each file is named after its task.

    Returns:
        The scores of each task (:func:`score_records`), and the names of the files in the folder that were skipped
        because they are not named after a task.

    Raises:
        KvbenchError: there is no such file or task, a folder has several files for a task, or a record is invalid.
    """
    exists(str(path), "path")
    single = data.is_file(path, "")
    if single is None:
        raise KvbenchError(
            f"{path} does not exist.\n  hint: name a .jsonl file, or a folder of files named <task>.jsonl"
        )
    if single:
        name = task or _stem(path)
        return {name: _score_file(name, path)}, []
    if task is not None:
        files = [file for file in sorted(path.iterdir()) if _stem(file) == task]
        if len(files) != 1:
            raise KvbenchError(
                f"{path} contains {len(files) or 'no'} files of outputs for --task {task}.\n  hint: name the file "
                "to score instead of the folder"
            )
        return {task: _score_file(task, files[0])}, []
    scores: dict[str, dict[str, Any]] = {}
    skipped = []
    for file in sorted(path.iterdir()):
        if not file.name.endswith(_ENDINGS):
            continue
        if _stem(file) in scores:
            raise KvbenchError(
                f"{path} contains two files of outputs for the task {_stem(file)}.\n  hint: remove one, or "
                f"score {file} separately"
            )
        if known_task(_stem(file)):
            scores[_stem(file)] = _score_file(_stem(file), file)
        else:
            skipped.append(file.name)
    if not scores:
        raise KvbenchError(
            f"{path} does not contain a file with the name of a task "
            f"({', '.join(list(longbench.METRICS)[:4])}, ..., gsm8k).\n"
            "  hint: use --task TASK to score a file with another name"
        )
    return scores, skipped


def score_records(task: str, records: Sequence[Record], where: str = "records") -> dict[str, Any]:
    """Score model outputs for one task; each record is a line of a file of outputs.

    Args:
        where: file or other source of the records, for error messages.

    Returns:
        ``score`` and ``stderr`` (mean and standard error, 0 to 100, rounded to two digits as in LongBench's eval.py),
        ``n`` (number of records), and ``variants`` (scores of the same outputs by other rules). For tasks whose names
        end in ``_e`` (LongBench-E), also ``buckets``: the scores of samples of length ``0-4k``, ``4-8k`` and ``8k+``,
        None where there are no samples.

    Raises:
        KvbenchError: the task is unknown, there are no records, or a record lacks a response or an answer.
    """
    places = (f"{where}, record {number}" for number in range(len(records)))
    return _score_placed(task, zip(places, records, strict=True), where)


def _score_file(task: str, path: Path) -> dict[str, Any]:
    _check_known(task)
    return _score_placed(task, data.placed_records(Found(path)), str(path))


def _check_known(task: str) -> None:
    if not known_task(task):
        near = nearest(task, [*longbench.METRICS, *EXTENDED, *_GSM8K])
        hint = (
            f"did you mean --task {near}?"
            if near
            else f"use --task with one of {', '.join([*longbench.METRICS, *_GSM8K])}"
        )
        raise KvbenchError(f"'{task}' is not a task of LongBench or GSM8K.\n  hint: {hint}")


def _score_placed(task: str, records: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the same as :func:`score_records`, for pairs of a record's place (for messages) and the record."""
    _check_known(task)
    score_one = _gsm8k if task in _GSM8K else _longbench
    rows = []
    for place, record in records:
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: the record is not a JSON object.")
        try:
            rows.append(score_one(task, dict(record), place))
        except ValueError as problem:
            raise DataError(f"{place}: {problem}") from problem
    if not rows:
        raise DataError(f"{where}: there are no records.")
    mean, error = mean_error([row["score"] for row in rows])
    assert mean is not None
    entry: dict[str, Any] = {
        "score": round(100 * mean, 2),
        "stderr": None if error is None else round(100 * error, 2),
        "n": len(rows),
        "variants": {
            name: longbench.longbench_mean([row[name] for row in rows])
            for name in rows[0]
            if name not in ("score", "length")
        },
    }
    if task.endswith("_e"):
        parts: dict[str, list[float]] = {"0-4k": [], "4-8k": [], "8k+": []}
        for row in rows:
            parts[longbench.bucket(row["length"])].append(row["score"])
        entry["buckets"] = {name: longbench.longbench_mean(part) if part else None for name, part in parts.items()}
    return entry


def known_task(task: str) -> bool:
    """Return True if `task` is a task of LongBench, LongBench-E or GSM8K."""
    return task in _GSM8K or task in longbench.METRICS or task in EXTENDED


def _longbench(task: str, record: Record, where: str) -> dict[str, Any]:
    prediction, answers = _text_field(record, RESPONSES, where), _field(record, ANSWERS, where)
    answers, classes = [answers] if isinstance(answers, str) else answers, record.get("all_classes")
    TEXTS.check(answers, "/".join(ANSWERS), where)
    TEXTS_OR_NULL.check(classes, "all_classes", where)
    if problem := longbench.unanswerable(task, answers, classes):
        raise DataError(f"{where}: {problem}.")
    row: dict[str, Any] = {"score": longbench.score_longbench(task, prediction, answers, classes)}
    limited = longbench.limited_rouge(task, prediction, answers)
    if limited is not None:
        row["rouge_1_0_1"] = limited
    if task.endswith("_e"):
        row["length"] = _field(record, ("length",), where)
        COUNT.check(row["length"], "length", where)
    return row


def _gsm8k(task: str, record: Record, where: str) -> dict[str, Any]:
    document = record.get("doc")
    answer = document["answer"] if isinstance(document, Mapping) and "answer" in document else None
    if answer is None:
        answer = _text_field(record, ANSWERS, where)
    FILLED_TEXT.check(answer, "/".join(ANSWERS), where)
    response = _text_field(record, RESPONSES, where)
    row = gsm8k.score_gsm8k(response, answer)
    if task == "gsm8k_logquant":
        row["score"] = row["digits"] = gsm8k.score_digits(response, answer)
    return row


def _text_field(record: Record, names: Sequence[str], where: str) -> str:
    value = _field(record, names, where)
    while isinstance(value, list) and value:  # lm-evaluation-harness keeps lists of lists of responses
        value = value[0]
    TEXT.check(value, "/".join(names), where)
    return str(value)


def _field(record: Record, names: Sequence[str], where: str) -> Any:
    for name in names:
        if name in record:
            return record[name]
    needed = f"one of the fields {', '.join(names)}" if len(names) > 1 else f"the field {names[0]}"
    raise DataError(f"{where}: the record needs {needed}, but has only {', '.join(map(str, record))}.")


def _overall(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the unweighted mean of the tasks' scores, as papers report it, and the number of tasks."""
    return {"mean": round(sum(entry["score"] for entry in scores.values()) / len(scores), 2), "tasks": len(scores)}


def _score_lines(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    lines = []
    for task, entry in report["scores"].items():
        beside = {**entry["variants"], **entry.get("buckets", {})}
        differing = {k: v for k, v in beside.items() if v != entry["score"] or k in ("strict", "flexible")}
        error = "-" if entry["stderr"] is None else f"±{entry['stderr']:.2f}"
        shown = ", ".join(f"{name} {'-' if value is None else f'{value:.2f}'}" for name, value in differing.items())
        lines.append((task, f"{entry['score']:.2f}", error, f"{entry['n']}  {shown}".rstrip()))
    if report["tasks"] > 1:
        lines.append((f"mean of {report['tasks']} tasks", f"{report['mean']:.2f}", "", ""))
    return lines


def _print(report: Mapping[str, Any]) -> None:
    body = [[Cell(text) for text in line] for line in _score_lines(report)]
    grid = table.Grid(("task", "score", "stderr", "n"), body, left=(0, 3))
    print(table.render_text(grid.drawn()))
    print(
        f"Scores from 0 to 100; code similarity by {longbench.SIMILARITY}; ROUGE-L as in rouge 1.0.1, "
        "without its recursion limit"
    )
    if report["skipped"]:
        print(f"skipped, because they are not named after tasks: {', '.join(report['skipped'])}")


def _score_markdown(report: Mapping[str, Any]) -> str:
    rows = [
        "| task | score | stderr | n |",
        "|:--|--:|--:|:--|",
        *("| " + " | ".join(r) + " |" for r in _score_lines(report)),
    ]
    return "\n".join(rows) + "\n"


def _stem(path: Path) -> str:
    name = path.name
    for ending in _ENDINGS:
        name = name.removesuffix(ending) if path.name.endswith(ending) else name
    return name


def _score_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.score",
        description="Score model outputs that are stored in the format of LongBench or GSM8K.",
    )
    parser.add_argument("path", type=Path, help="a .jsonl file (also .json, .gz), or a folder of <task>.jsonl")
    parser.add_argument(
        "--task", help="task, such as qasper, qasper_e (LongBench-E) or gsm8k (default: the file's name)"
    )
    parser.add_argument("--format", choices=("screen", "json", "markdown"), default="screen")
    parser.add_argument("-o", "--output", type=Path, help="also write the scores as JSON to this file")
    return parser
