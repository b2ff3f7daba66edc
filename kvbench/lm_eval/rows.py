"""Rows of kvbench from the files that lm-eval writes, so that kvbench's tables, comparisons and page show them.

An evaluation has one JSON line per sample and filter, and a file of results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import DataError
from kvbench.results import code as codes
from kvbench.results import summary
from kvbench.results.environment import environment
from kvbench.results.identity import identity, run_id
from kvbench.results.samples import MEASURED, Row
from kvbench.results.store import RunStore
from kvbench.runner import resolve, sources
from kvbench.util.progress import say

if TYPE_CHECKING:
    from kvbench.lm_eval.model import CachedLM


@dataclass
class Logs:
    """The files that lm-eval writes below ``--output_path`` (a folder, or a .json file in one) from now on."""

    place: Path
    _before: dict[Path, int] = field(init=False)

    def __post_init__(self) -> None:
        self._before = dict(self._files())

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Return the new sample logs by task, the lines in order; a task's name is that in the results.

        Raises:
            DataError: a line is not a JSON object.
        """
        tasks = self.results().get("configs") or {}
        logs: dict[str, list[dict[str, Any]]] = {}
        for path in self._new("samples_"):
            name = next(
                (task for task in sorted(tasks, key=len, reverse=True) if path.name.startswith(f"samples_{task}_")),
                None,
            )
            if name is not None:
                logs[name] = list(_json_lines(path))
        return logs

    def results(self) -> dict[str, Any]:
        """Return the new file of results: metrics, versions and configurations of tasks; empty if there is none."""
        for path in self._new(""):
            if path.suffix == ".json":
                content = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(content, Mapping) and "configs" in content:
                    return dict(content)
        return {}

    def _files(self) -> Iterator[tuple[Path, int]]:
        folder = self.place.parent if self.place.suffix == ".json" else self.place
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.suffix in (".json", ".jsonl"):
                yield path, path.stat().st_mtime_ns

    def _new(self, prefix: str) -> list[Path]:
        """Return the files that were written since this object was made, the newest last."""
        new = [(time, path) for path, time in self._files() if self._before.get(path) != time]
        return [path for _, path in sorted(new) if path.name.startswith(prefix)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: is no JSON ({error}).\n  hint: run the evaluation again"
            ) from error
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: is no JSON object.\n  hint: run the evaluation again")
        yield content


#: version of the rows; a change makes other runs
VERSION = 1
#: metrics of a sample that count as its score, the first that it has
SCORES = ("acc_norm", "exact_match", "acc", "f1", "score")


def store(logs: Logs, model: CachedLM, folder: Path) -> Path | None:
    """Write an evaluation's rows as a run, and return the run's folder; None if no task has scores per sample.

    The run's identity is the model, the setting, lm-eval's own arguments of the model, and lm-eval's configuration and
    version of each task. An evaluation of the same identity replaces the rows of the same documents; rows of other
    documents stay in the file, but no figure includes them. `folder` is that of all runs.

    Raises:
        KvbenchError: a file cannot be read or written.
    """
    results = logs.results()
    rows = [row for task, lines in sorted(logs.samples().items()) for row in task_rows(task, lines, model)]
    if not rows:
        return None
    tasks = sorted({row["task"] for row in rows})
    data = {
        "identity": {
            "target": "lm_eval",
            "tasks": {name: _task_digest(name, results) for name in tasks},
            **({"host": model.host} if model.host else {}),
        },
        "version": VERSION,
    }
    chosen = model.chosen
    asked = {"dataset": {"name": f"lm_eval/{'+'.join(tasks)}", "tasks": tasks}}
    checked = replace(chosen, plain={**chosen.plain, **asked})
    settled = resolve.settled(checked)
    name = run_id(identity(settled, data, chosen.model.folder(), say))
    config = resolve.fitted(checked).plain
    run = RunStore(folder, name, say)
    current = sources.code(config)
    on_gpu = model.loaded.device.type == "cuda"
    where = environment(str(model.loaded.device), model.machine.device, model.machine.dtypes())
    for row in rows:
        row[MEASURED]["code"] = codes.used(current, row, on_gpu=on_gpu)
    with run.hold():
        run.start(config, where)
        run.recover()
        run.append(rows)
        stored = run.samples().rows
        ids = list(dict.fromkeys(row["id"] for row in rows))
        metrics = summary.build(
            run,
            config,
            status="ok",
            rows=[stored[name] for name in ids],
            left_out=[name for name in stored if name not in ids],
            requested=len(rows),
            task_version=VERSION,
            environment=where,
            device=model.machine.device,
            code=current,
            data={"identity": data["identity"], "notes": _notes(results, model)},
        )
        run.write_metrics(metrics)
        summary.pair_siblings(run)
    return run.path


def task_rows(task: str, lines: Sequence[Mapping[str, Any]], model: CachedLM) -> list[Row]:
    """Return the rows of a task: one per document, scored by its first metric that is a number between 0 and 1.

    Further metrics and filters are further scores of the row, named ``METRIC,FILTER``. The lines are the task's sample
    log.
    """
    rows: dict[Any, Row] = {}
    for line in lines:
        scores = _scores(line)
        main = next((scores[name] for name in (*SCORES, *scores) if name in scores), None)
        if main is None:
            continue
        named = {f"{name},{line.get('filter')}": value for name, value in scores.items()}
        row = rows.get(line["doc_id"])
        if row is not None:
            row["scores"] |= named
            continue
        prompt = str(line["arguments"]["gen_args_0"]["arg_0"])
        figures = model.figures.by_prompt.get(prompt, {})
        rows[line["doc_id"]] = {
            "id": f"{task}/{line['doc_id']}-{str(line.get('doc_hash'))[:8]}",
            "task": task,
            "length": None,
            "prompt_tokens": figures.get("prompt_tokens", 0),
            "truncated": figures.get("truncated", 0),
            "prediction": _answer(line),
            "tokens": [],
            "finish": figures.get("finish", "window"),
            "scores": {"score": main, **named},
            "scorer_version": VERSION,
            "nll": None,
            "kv_bytes": figures.get("kv_bytes"),
            MEASURED: dict(figures.get("measured") or model.machine.measured(1, None, None)),
        }
    return list(rows.values())


def _scores(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a sample that are numbers between 0 and 1."""
    values = {name: line.get(name) for name in line.get("metrics") or ()}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
    }


def _answer(line: Mapping[str, Any]) -> str:
    """Return the answer as text: the generated one, or the log-likelihoods of the choices."""
    responses = line.get("filtered_resps") or [""]
    if len(responses) == 1 and isinstance(responses[0], str):
        return responses[0]
    return json.dumps(responses, ensure_ascii=False)


def _task_digest(task: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines a task's prompts and scores: its version, its examples and a hash of its configuration."""
    config = dict((results.get("configs") or {}).get(task) or {})
    config.pop("metadata", None)  # holds the arguments of the model too
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    shots = (results.get("n-shot") or {}).get(task)
    chat = results.get("chat_template_sha")
    system = results.get("system_instruction_sha")
    return {
        "version": (results.get("versions") or {}).get(task),
        "shots": shots,
        "config": digest,
        "chat": chat,
        **({"system": system} if system else {}),
        **({"multiturn": False} if chat and results.get("fewshot_as_multiturn") is False else {}),
    }


def _notes(results: Mapping[str, Any], model: CachedLM) -> dict[str, Any]:
    figures = model.figures
    return {"lm_eval": results.get("lm_eval_version"), "requests": figures.requests, "exact_requests": figures.exact}
