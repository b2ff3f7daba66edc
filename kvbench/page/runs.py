"""The figures of a run in the compact form that the report page uses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.metrics import intervals
from kvbench.page.numbers import json_value, short_number, shorten_middle, spread, trimmed, whole_or_empty
from kvbench.results import aggregate, points
from kvbench.results import code as codes
from kvbench.results.columns import UNFINISHED
from kvbench.results.identity import BASELINE_TARGET
from kvbench.results.labels import run_label
from kvbench.results.samples import Row
from kvbench.results.store import RunStore


@dataclass(frozen=True)
class Entry:
    """One run of the report.

    Args:
        metrics: content of its `metrics.json`, but ``status`` and ``older`` compare with the present code. If a run
            has no valid `metrics.json`: the same keys with what is known so far, and the status ``unfinished``.
        config: content of its `config.yaml`; empty if it cannot be read.
        command: the command that repeats the run; empty if its configuration cannot be read.
        changes: the settings in which the run differs from its presets, by dotted key.
    """

    store: RunStore
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    command: str
    changes: Mapping[str, Any]


#: parts of the bill, in the order of the page's arrays
PARTS = ("codes", "scales", "window", "index", "state")
#: maximum number of scores and of points of one run that the page holds
MOST_SCORES, MOST_POINTS = 40, 32
#: maximum number of entries of a run's environment, and of characters of each
MOST_FACTS, LONGEST_FACT = 32, 100
#: maximum length of a run's command in characters; a longer one is left out
LONGEST_COMMAND = 1200
#: significant digits of the scores of single tasks
TASK_DIGITS = 4


def page_summary(entry: Entry) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the figures of a run for the page, and for each sample id with a score whether the score is 1.

    Reads the run's samples: for the distributions of times, for the answers, and for the scores of a run that has not
    finished. The figures have short keys, which `assets/data.js` explains; absent keys stand for unknown values.
    ``problem`` is a message if the samples cannot be read.
    """
    metrics, problem = entry.metrics, None
    try:
        rows = list(entry.store.samples().rows.values())
    except KvbenchError as error:
        rows, problem = [], str(error).splitlines()[0]
    if metrics["status"] == UNFINISHED and rows:
        metrics = partial(metrics, rows)
    figures = {
        **_identity(entry, metrics),
        **_scores(metrics),
        **_memory_entry(metrics),
        **_time_entry(metrics, rows),
        "points": _point_entries(metrics),
        "problem": problem,
    }
    known = {key: value for key, value in figures.items() if value not in (None, "", [], {})}
    return known, _right(rows)


def flips(answers: Mapping[str, bool], base: Mapping[str, bool]) -> list[Any]:
    """Count the answers whose correctness differs from fp16's (``flips`` of :mod:`kvbench.metrics.fidelity`).

    Both arguments say, by the id of each sample, whether the answer is right.

    Returns:
        The number of samples that only fp16 answers right, the number that only this run answers right, the number of
        common samples, and both ends of the interval of the share that flipped; empty without common samples.
    """
    common = answers.keys() & base.keys()
    lost, won = (sum(one[name] > other[name] for name in common) for one, other in ((base, answers), (answers, base)))
    return [lost, won, len(common), *map(short_number, intervals.wilson(lost + won, len(common)))] if common else []


def _right(rows: Iterable[Row]) -> dict[str, bool]:
    scores = ((row["id"], short_number(row["scores"].get("score"))) for row in rows)
    # runs of one group have the same ids, which are thus kept once
    return {sys.intern(name): score >= 1 - 1e-9 for name, score in scores if score is not None}


def _score_figures(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return score, its reach, samples, difference from fp16, and its reach.

    A reach is the distance from the number to the farther end of its 95 % interval.
    """
    pair, score = entry.get("vs_fp16") or {}, entry.get("score")
    reached = intervals.interval_reach(score, aggregate.interval_of(entry))
    apart = intervals.interval_reach(pair["diff"], aggregate.pair_interval(score, pair)) if pair else None
    return score, reached, entry.get("n"), pair.get("diff"), apart


def _of_perplexity(text: Mapping[str, Any]) -> float | None:
    if not text:
        return None
    interval = intervals.of_moments(text["ppl"], text.get("stderr"), text.get("windows") or 0)
    return intervals.interval_reach(text["ppl"], interval)


def partial(metrics: Mapping[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return the metrics of an unfinished run, with figures computed from the samples that are done."""
    try:
        scores = aggregate.scores(rows)
        timings = aggregate.timings(rows)
        device = max(timings, key=lambda name: timings[name]["n"], default=None)
        return {
            **metrics,
            "scores": scores,
            "mean": aggregate.overall(scores),
            "kv_bytes": aggregate.kv_bytes(rows),
            "peak_bytes": aggregate.peak_bytes(rows),
            **(timings[device] if device is not None else {}),
            "env": {**metrics["env"], "device_name": device},
        }
    except (KeyError, TypeError, ValueError, IndexError):  # rows of another version: the list of runs has no figures
        return dict(metrics)


def _identity(entry: Entry, metrics: Mapping[str, Any]) -> dict[str, Any]:
    config, samples = metrics["config"], metrics["samples"]
    older = metrics.get("older") or {}
    target = (config.get("method") or {}).get("_target_")
    return {
        "id": entry.store.run_id,
        "label": shorten_middle(run_label(metrics), 120),
        "model": shorten_middle(config.get("model") or "?", 120),
        "data": shorten_middle(config.get("dataset") or "?", 120),
        "status": metrics["status"],
        "older": (codes.older_code_remark(older.get("parts") or ()) or "").removeprefix("older code: "),
        "fp16": target == BASELINE_TARGET or None,
        "done": short_number(samples.get("done")),
        "asked": short_number(samples.get("requested")),
        "code": next(iter(metrics.get("code") or {}), None) if len(metrics.get("code") or {}) == 1 else None,
        "command": whole_or_empty(entry.command, LONGEST_COMMAND),
        "error": shorten_middle(metrics["error"]) if metrics.get("error") else None,
        "device": metrics["env"].get("device_name"),
        "env": _environment(metrics["env"]),
        "path": (metrics.get("attention") or {}).get("path"),
    }


def _environment(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run recorded about its machine, by dotted key: device, dtype, packages, load and so on."""
    facts: dict[str, Any] = {}
    for key, value in known.items():
        parts = value.items() if isinstance(value, Mapping) else [(None, value)]
        facts |= {
            f"{key}.{name}" if name else key: json_value(part, LONGEST_FACT) for name, part in parts if part is not None
        }
    return dict(list(facts.items())[:MOST_FACTS])


def _scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean score, the fidelity to fp16, and the figures of each task.

    A task is ``[key, score, reach, n, difference, its reach, perplexity, its reach, mean KL, KL percentile 99.9]``.
    """
    tasks, perplexities = [], []
    compared = [entry["fidelity"] for entry in metrics["scores"].values() if entry.get("fidelity")]
    for key, entry in metrics["scores"].items():
        pair, text = entry.get("vs_fp16") or {}, entry.get("perplexity") or {}
        pair = text.get("vs_fp16") or pair
        if text:
            perplexities.append((text, pair))
        if entry.get("points"):
            continue
        figures = _score_figures(entry)
        if text.get("vs_fp16"):
            figures = (
                *figures[:3],
                pair["diff"],
                intervals.interval_reach(pair["diff"], aggregate.pair_interval(None, pair)),
            )
        kld = (entry.get("fidelity") or {}).get("kld") or {}
        others = (text.get("ppl"), _of_perplexity(text), kld.get("mean"), kld.get("p99_9"))
        tasks.append(trimmed([key, *(short_number(v, TASK_DIGITS) for v in (*figures, *others))]))
    mean = metrics["mean"]
    figures = _score_figures(mean)
    one = perplexities[0] if len(perplexities) == 1 else ({}, {})
    return {
        "score": trimmed([short_number(value) for value in (*figures, *(aggregate.interval_of(mean) or ()))])
        if mean["score"] is not None
        else None,
        "ppl": trimmed(
            [short_number(value) for value in (one[0].get("ppl"), _of_perplexity(one[0]), one[1].get("diff"))]
        ),
        "kl": _fidelity(compared),
        "left": _departures([entry["left"] for entry in [*metrics["scores"].values(), *compared] if entry.get("left")]),
        "tasks": tasks[:MOST_SCORES],
        "more_tasks": max(0, len(tasks) - MOST_SCORES) or None,
    }


def _fidelity(compared: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return mean and 99.9 % percentile of the KL divergence, the share of equal first choices, and the median KL.

    Each is a mean over the tasks. With a single task, the intervals of the mean and of the share follow.
    """
    columns = [
        (entry["kld"]["mean"], entry["kld"]["p99_9"], entry["same_top"]["share"], entry["kld"].get("median"))
        for entry in compared
    ]
    means = [None if None in column else sum(column) / len(columns) for column in zip(*columns, strict=True)]
    if len(compared) == 1:
        means += [compared[0][part].get(end) for part in ("kld", "same_top") for end in ("low", "high")]
    return trimmed([short_number(value) for value in means])


def _departures(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the number of answers that equal fp16's to their end, of all answers, and the median token of departure.

    The median is known for a single task, and None if more than half of the answers never differ.
    """
    if not parts:
        return []
    count = sum(part["n"] for part in parts)
    equal = round(sum(part["never"] * part["n"] for part in parts))
    return trimmed([equal, count, short_number(parts[0].get("median")) if len(parts) == 1 else None])


def _memory_entry(metrics: Mapping[str, Any]) -> dict[str, Any]:
    used, reserved = metrics["kv_bytes"]["used"], metrics["kv_bytes"]["reserved"]
    peak = metrics["peak_bytes"]
    return {
        "kv": short_number(used.get("total")),
        "bill": [short_number(used.get(part)) or 0 for part in PARTS] if used.get("total") is not None else None,
        "reserved": short_number(reserved.get("total")),
        "ratio": short_number(metrics["kv_bytes"].get("ratio")),
        "peak": trimmed([short_number(peak.get("prefill")), short_number(peak.get("decode"))]),
    }


def _time_entry(metrics: Mapping[str, Any], rows: list[Row]) -> dict[str, Any]:
    first, later = spread(rows, metrics["env"].get("device_name"))
    return {
        "ttft": short_number(metrics["ttft_s"]["median"]),
        "tpot": short_number(metrics["tpot_s"]["median"]),
        "p99": short_number(metrics["tpot_s"].get("p99")),
        "rate": short_number(metrics.get("tokens_per_s")),
        "ttfts": first,
        "tpots": later,
    }


def _point_entries(metrics: Mapping[str, Any]) -> list[list[Any]]:
    """Return ``[prompt, batch, status, TTFT, TPOT, p10, p90, tokens per second, KV bytes, decode peak]`` per point."""
    table = []
    for prompt, batch, figures in points.each(metrics):
        tpot = figures.get("tpot_s") or {}
        values = (
            figures.get("ttft_s"),
            tpot.get("median"),
            tpot.get("p10"),
            tpot.get("p90"),
            figures.get("tokens_per_s"),
            figures.get("kv_used"),
            figures.get("peak_decode"),
        )
        table.append(trimmed([prompt, batch, figures["status"], *map(short_number, values)]))
    return table[:MOST_POINTS]
