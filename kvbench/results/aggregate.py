"""Computation of the figures in `metrics.json` from a run's rows: scores, differences from fp16, bytes and timings.

Timings are TTFT, TPOT and decoding speed, for each device.

A row is the recorded result of one sample. The standard error of a mean over n samples is ``std(ddof=1) / sqrt(n)``. A
difference from fp16 is paired: the mean of (method - fp16) over the samples that both runs have, with the standard
error of these differences. This error is far smaller than that of a difference of two independent means, because both
runs answer the same questions. Scores and their differences have 95 % intervals too
(:mod:`kvbench.metrics.intervals`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

from kvbench.metrics import intervals
from kvbench.metrics.kl_bound import until_divergence
from kvbench.results.fidelity_fold import answers_left, fold_fidelity_rows
from kvbench.results.points import halves, summarize_points
from kvbench.results.samples import Row


def timings(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Summarize TTFT, TPOT and decoding speed for each device that ran samples, without warm-up samples.

    The median and the p99 of TPOT leave out the first decode step of each sample. That step is reported separately,
    because it includes work that a method does once after the prompt. The result maps the name of a device to the
    fields of :class:`kvbench.results.record_cost.Times`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        timing = row.get("measured") or {}
        timed = timing.get("ttft_s") is not None or timing.get("step_s")
        if timed and not timing.get("warm_up"):
            groups.setdefault(str(timing.get("device")), []).append(timing)
    by_device = {}
    for device, group in groups.items():
        later = [step for timing in group for step in timing["step_s"][1:]]
        first = [timing["step_s"][0] for timing in group if timing["step_s"]]
        # the rows of a batch share the time of a step, so each counts its fraction
        seconds = sum((timing.get("decode_s") or sum(timing["step_s"])) / timing["batch_rows"] for timing in group)
        tokens = sum(timing["decoded"] for timing in group)
        starts = [timing["ttft_s"] for timing in group if timing.get("ttft_s") is not None]
        by_device[device] = {
            "ttft_s": {
                "median": _median(starts),
                "n": len(starts),
                "shared": sum(timing.get("ttft_s") is not None and "shared_prefill" in timing for timing in group),
            },
            "tpot_s": {
                "median": _median(later),
                "p99": percentile(later, 99),
                "first_step": _median(first),
                "n": len(later),
            },
            "tokens_per_s": tokens / seconds if seconds else None,
            "n": len(group),
        }
    return by_device


def no_timings() -> dict[str, Any]:
    """Return an entry of :func:`timings` for a device that timed no samples: all figures None, all counts 0."""
    return {
        "ttft_s": {"median": None, "n": 0, "shared": 0},
        "tpot_s": {"median": None, "p99": None, "first_step": None, "n": 0},
        "tokens_per_s": None,
        "n": 0,
    }


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return a percentile `q` (0 to 100) with linear interpolation, which is numpy's default; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


PARTS = ("codes", "scales", "window", "index", "state")


def mean_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of values (None without values) and its standard error (None with fewer than two values)."""
    if not values:
        return None, None
    mean = fmean(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def scores(
    rows: Iterable[Row], baseline: Mapping[str, Row] | None = None, version: int | None = None
) -> dict[str, dict[str, Any]]:
    """Average the scores of a run's samples, for each task or for each task and prompt length.

    Args:
        baseline: rows of the fp16 run with the same model and data, by sample id; None if there is no such run.
        version: the task's version, copied into each entry.

    Returns:
        A dict from ``task`` or ``task@length`` to a dict with the fields of
        :class:`kvbench.results.record_scores.Score`; ``points`` and ``fidelity`` only if the samples have them:

        - ``low``, ``high``: ends of the 95 % interval, if there is a score in 0..1. ``vs_fp16`` has them too.
        - ``vs_fp16``: mean difference from fp16 over the samples that both runs have; None without a baseline.
        - ``variants``: means of the other scores that the task's scorer computes.
        - ``nll``: mean negative log-likelihood per token of the reference answers, in nats; None if there are none.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(score_key(row), []).append(row)
    by_key = {}
    for key, group in groups.items():
        entry: dict[str, Any] = _compare_paired(group, baseline, _finite_score, bounded=True)
        entry = {"score": entry.pop("mean"), **entry, "version": version}
        entry["scorer_version"] = max(row["scorer_version"] for row in group)
        names = sorted({name for row in group for name in row["scores"]} - {"score"})
        variants = {}
        for name in names:
            mean, error = mean_error(_of_problems(group, partial(_score_named, name)))
            variants[name] = {"score": mean, "stderr": error}
        entry["variants"] = variants
        if any("problem" in row for row in group):
            entry["answers"] = len(group)
        nll = _compare_paired(group, baseline, nll_per_token)
        entry["nll"] = nll if nll["n"] else None
        entry["perplexity"] = perplexity(group, nll)
        measured = summarize_points(group, baseline)
        if measured is not None:
            entry["points"] = measured
        bound = kl_bound(group, baseline)
        if bound is not None:
            entry["kl_bound"] = bound
        names = [row["id"] for row in group if row["id"] in (baseline or {})]
        left = answers_left(baseline or {}, {row["id"]: row for row in group}, names)
        if left is not None:
            entry["left"] = left
        compared = fold_fidelity_rows(group)
        if compared is not None:
            entry["fidelity"] = compared
        by_key[key] = entry
    return by_key


def kl_bound(group: Sequence[Row], baseline: Mapping[str, Row] | None) -> dict[str, Any] | None:
    """Fold the log-probabilities that servers returned into the fields of :class:`record_scores.KlBound`.

    The result is None without a baseline, or if either run has no log-probabilities.
    """
    pairs = [(row, (baseline or {}).get(row["id"]) or {}) for row in group if row.get("top_logprobs")]
    per_row = [
        until_divergence(other["tokens"], row["tokens"], other["top_logprobs"], row["top_logprobs"])
        for row, other in pairs
        if other.get("top_logprobs")
    ]
    per_row = [bounds for bounds in per_row if bounds]
    if not per_row:
        return None
    places = [bound for bounds in per_row for bound in bounds]
    return {
        "mean": fmean(places),
        "stderr": mean_error([fmean(bounds) for bounds in per_row])[1],
        "positions": len(places),
        "prompts": len(per_row),
        "top": max(len(place) for row, _ in pairs for place in row["top_logprobs"]),
    }


def interval_ends(interval: tuple[float, float] | None) -> dict[str, float]:
    """Return an interval as a dict with the keys ``low`` and ``high``; an empty dict for None."""
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def interval_of(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of a score in `metrics.json`; for older files, computed from mean, stderr and n."""
    if entry.get("low") is not None:
        return entry["low"], entry["high"]
    score = entry.get("score")
    if score is None or not 0 <= score <= 1:
        return None
    return intervals.of_score_moments(score, entry.get("stderr"), entry.get("n") or 0)


def pair_interval(score: float | None, pair: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of a difference from fp16 in `metrics.json`; for older files, computed from its moments.

    `score` is the run's mean score (None if unknown), and `pair` the paired difference, ``{diff, stderr, n}``.
    """
    if pair.get("low") is not None:
        return pair["low"], pair["high"]
    if score is None or not 0 <= score <= 1 or not -1e-9 <= score - pair["diff"] <= 1 + 1e-9:
        return intervals.of_moments(pair["diff"], pair["stderr"], pair["n"] or 0)
    return intervals.of_pair_moments(score, score - pair["diff"], pair["stderr"], pair["n"] or 0)


def perplexity(group: Sequence[Row], nll: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compute the perplexity of a text from its spans, one row each; None if the rows are results of another kind.

    As in GPTQ, it is the exponential of the mean over the spans of their mean negative log-likelihood (NLL) per token.
    Its standard error is, to first order, the perplexity times the standard error of the mean NLL. The difference from
    fp16 is a difference of perplexities; its standard error comes from the paired differences of the spans' NLL. `nll`
    is the entry that :func:`scores` computes for these rows.
    """
    windows = [row for row in group if row.get("window")]
    if not windows or nll["mean"] is None:
        return None
    value = math.exp(nll["mean"])
    size = sum(row["window"]["bytes"] for row in windows)
    pair = nll["vs_fp16"]
    if pair is not None:
        other = math.exp(nll["mean"] - pair["diff"])
        spread = None if pair["stderr"] is None else value * pair["stderr"]
        pair = {"diff": value - other, "stderr": spread, "n": pair["n"]}
    return {
        "ppl": value,
        "stderr": None if nll["stderr"] is None else value * nll["stderr"],
        "bits_per_byte": sum(row["nll"]["sum"] for row in windows) / math.log(2) / size if size else None,
        **{key: windows[-1]["window"][key] for key in ("mode", "prefill", "chunk")},
        "windows": len(windows),
        "vs_fp16": pair,
    }


def overall(by_task: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of the scores from :func:`scores`, each task with the same weight, and its difference from fp16.

    ``n`` is the total number of samples. ``vs_fp16`` is None unless every task has a difference from fp16.
    """
    entries = [entry for entry in by_task.values() if entry["score"] is not None]
    pairs = [entry["vs_fp16"] for entry in entries]
    complete = bool(pairs) and all(pair is not None and pair["n"] for pair in pairs)
    mean: dict[str, Any] = {
        "score": fmean(e["score"] for e in entries) if entries else None,
        "stderr": root_mean(e["stderr"] for e in entries),
        "n": sum(e["n"] for e in entries),
        "vs_fp16": {
            "diff": fmean(p["diff"] for p in pairs),
            "stderr": root_mean(p["stderr"] for p in pairs),
            "n": sum(p["n"] for p in pairs),
        }
        if complete
        else None,
    }
    if complete:
        mean["vs_fp16"] |= interval_ends(_mean_difference(entries, mean))
    return mean | interval_ends(_of_mean(entries, mean))


def _of_mean(entries: Sequence[Mapping[str, Any]], mean: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of the mean score of several tasks.

    If all scores are shares of right answers over equally many samples, the samples of all tasks are pooled.
    """
    if len(entries) == 1:
        return interval_of(entries[0])
    parts = [(e["score"], e["stderr"], e["n"]) for e in entries]
    if len({part[2] for part in parts}) == 1 and all(intervals.is_share(*part) for part in parts):
        return intervals.wilson(sum(score * n for score, _, n in parts), mean["n"])
    return interval_of(mean)


def _mean_difference(entries: Sequence[Mapping[str, Any]], mean: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of the mean difference from fp16 of several tasks; pools samples as :func:`_of_mean` does."""
    if len(entries) == 1:
        return pair_interval(entries[0]["score"], entries[0]["vs_fp16"])
    parts = [
        (e["score"], e["score"] - e["vs_fp16"]["diff"], e["vs_fp16"]["stderr"], e["vs_fp16"]["n"]) for e in entries
    ]
    tables = [intervals.paired_counts(*part) for part in parts]
    if len({part[3] for part in parts}) == 1 and all(tables):
        return intervals.newcombe(*(sum(counts) for counts in zip(*filter(None, tables), strict=True)))
    return pair_interval(mean["score"], mean["vs_fp16"])


def kv_bytes(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the bytes of one sequence's KV cache at the end of its answer, averaged over the samples.

    They are the content of :class:`kvbench.results.record_cost.KvBytes`.
    """
    bills = [row["kv_bytes"] for row in rows if row.get("kv_bytes")]
    bytes_held: dict[str, Any] = {}
    for kind in ("used", "reserved"):
        parts = {part: _mean_int([bill[kind].get(part, 0) for bill in bills]) for part in PARTS}
        total = sum(count or 0 for count in parts.values()) if bills else None
        bytes_held[kind] = {"total": total, **parts}
    bytes_held["fp16_equivalent"] = _mean_int([bill["fp16_equivalent"] for bill in bills])
    used = sum(bill["used"]["total"] for bill in bills)
    whole = sum(row["kv_bytes"]["fp16_equivalent"] * halves(row) for row in rows if row.get("kv_bytes"))
    bytes_held["ratio"] = whole / used if used else None
    return bytes_held


def peak_bytes(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the largest memory peaks of all samples, the content of :class:`kvbench.results.record_cost.PeakBytes`."""
    peaks = [row["measured"]["peak_bytes"] for row in rows if row.get("measured", {}).get("peak_bytes")]
    counted = [peak for peak in peaks if peak.get("prefill") is not None]
    return {
        "prefill": max((peak["prefill"] for peak in counted), default=None),
        "decode": max((peak["decode"] for peak in counted if peak["decode"] is not None), default=None),
        "kind": counted[-1]["kind"] if counted else None,
        "rss": max((peak["rss"] for peak in peaks if peak.get("rss")), default=None),
        "n": len(counted),
    }


def score_key(row: Mapping[str, Any]) -> str:
    """Return the key in ``metrics.json`` for a row's scores: ``task@length`` if the row has a length, else ``task``."""
    return str(row["task"]) if row.get("length") is None else f"{row['task']}@{row['length']}"


def nll_per_token(row: Row) -> float | None:
    """Return the mean negative log-likelihood per token of a sample's reference answer, in nats; None without one."""
    nll = row.get("nll")
    return nll["sum"] / nll["n"] if nll and nll.get("n") and _finite(nll["sum"]) is not None else None


def _compare_paired(
    group: Sequence[Row],
    baseline: Mapping[str, Row] | None,
    value: Callable[[Row], float | None],
    bounded: bool = False,
) -> dict[str, Any]:
    """Return mean, standard error, n, and the paired difference to the baseline over the same sample ids.

    Several answers to one problem count as one value, their mean, because they depend on each other: n is then the
    number of problems, and errors are by problem.

    Args:
        baseline: rows of fp16 by sample id; None: no difference.
        bounded: True for scores, which have intervals if all of them are in 0..1.
    """
    values = _of_problems(group, value)
    mean, error = mean_error(values)
    entry: dict[str, Any] = {"mean": mean, "stderr": error, "n": len(values), "vs_fp16": None}
    bounded = bounded and all(0 <= number <= 1 for number in values)
    if bounded:
        entry |= interval_ends(intervals.of_scores(values))
    if baseline is not None:
        both: dict[str, list[tuple[float, float]]] = {}
        for row in group:
            other = baseline.get(row["id"])
            # scores of different scorer versions cannot be compared; the baseline is re-scored when it is run again
            if other is None or other["scorer_version"] != row["scorer_version"]:
                continue
            own, full = value(row), value(other)
            if own is not None and full is not None:
                both.setdefault(problem_of(row), []).append((own, full))
        if both:
            pairs = [(fmean(own for own, _ in pair), fmean(full for _, full in pair)) for pair in both.values()]
            difference, spread = mean_error([own - full for own, full in pairs])
            entry["vs_fp16"] = {"diff": difference, "stderr": spread, "n": len(pairs)}
            if bounded and all(0 <= full <= 1 for _, full in pairs):
                entry["vs_fp16"] |= interval_ends(intervals.of_pairs(*zip(*pairs, strict=True)))
    return entry


def _score_named(name: str, row: Row) -> float | None:
    return _finite(row["scores"].get(name))


def _finite_score(row: Row) -> float | None:
    return _score_named("score", row)


def problem_of(row: Row) -> str:
    """Return the name of the problem that a row answers: several answers to one problem depend on each other."""
    name: str = row.get("problem") or row["id"]
    return name


def _of_problems(group: Iterable[Row], value: Callable[[Row], float | None]) -> list[float]:
    """Return the mean value of each problem's answers; a row without a problem of its own name is one by itself."""
    by_problem: dict[str, list[float]] = {}
    for row in group:
        number = value(row)
        if number is not None:
            by_problem.setdefault(problem_of(row), []).append(number)
    return [fmean(numbers) if len(numbers) > 1 else numbers[0] for numbers in by_problem.values()]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mean_int(values: Sequence[int]) -> int | None:
    return round(fmean(values)) if values else None


def root_mean(errors: Iterable[float | None]) -> float | None:
    """Return the standard error of the mean of independent figures; None without figures, or if one has no error."""
    known = list(errors)
    if not known or any(error is None for error in known):
        return None
    return math.sqrt(sum(error * error for error in known if error is not None)) / len(known)
