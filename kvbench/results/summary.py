"""The content of `metrics.json`, computed from the rows of a run and of the fp16 run with which it is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results import aggregate, inter_token, record
from kvbench.results.code import Code, changed, kinds, older, order, unlike
from kvbench.results.identity import is_baseline, rounded_weights, short_name
from kvbench.results.points import headline
from kvbench.results.samples import MEASURED, Row
from kvbench.results.speculation import add_speedups, speculation
from kvbench.results.store import RunStore


def build(
    store: RunStore,
    config: Mapping[str, Any],
    *,
    status: str,
    rows: Sequence[Row],
    left_out: Sequence[str] = (),
    too_long: Mapping[str, Sequence[str]] | None = None,
    requested: int,
    task_version: int,
    environment: Mapping[str, Any],
    device: str | None = None,
    oom: Mapping[str, Any] | None = None,
    errors: Sequence[Mapping[str, Any]] = (),
    code: Code | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute the content of a run's `metrics.json` (:mod:`kvbench.results.record`).

    Args:
        store: the run. The fp16 run to compare it with is looked up in the same results directory.
        status: ``ok``, ``oom``, ``error`` or ``interrupted``.
        rows: those of requested samples that are finished. Rows of warm-up samples are used only for peak memory.
        left_out: ids of samples that are finished but no longer requested, because the limit was reduced. They are
            listed in the result; their rows must not be in `rows`.
        too_long: ids of samples that the model does not hold with their answers, by the key of their score.
        device: name of the device whose times the top-level keys (``ttft_s``, ``tpot_s``, ``tokens_per_s``) report, if
            rows come from several devices. None for the device with the most samples.
        oom: ``{bytes_asked, sample, message, code}`` if the run ended because memory ran out, else None.
        code: digest of each part of the current source code (:mod:`kvbench.runner.sources`). If other code produced
            some of the samples, the status ``older`` replaces ``ok``. None skips this comparison.
        data: what the key ``data`` of the result holds: ``identity`` and ``notes`` of the data set, and ``origin`` if
            files came from the hub.
    """
    peak = aggregate.peak_bytes(rows)
    rows = [row for row in rows if not row.get("warm_up")]
    pair = None if is_baseline(config) else baseline(store)
    fp16_rows = pair.samples().rows if pair else {}
    by_task = aggregate.scores(rows, fp16_rows if pair else None, task_version)
    devices = aggregate.timings(rows)
    if device not in devices and devices:
        device = max(devices, key=lambda name: devices[name]["n"])
    times = devices.get(device or "", aggregate.no_timings())
    counts, parts = kinds(rows)
    older = older_code(counts, parts, oom, code) if code is not None else None
    metrics: dict[str, Any] = {
        "schema_version": record.SCHEMA_VERSION,
        "run_id": store.run_id,
        "status": "older" if status == "ok" and older else status,
        "label": short_name(config),
        "config": {
            "model": config["model"].get("name"),
            "method": dict(config["method"]),
            "quantizer": (config.get("quantizer") or {}).get("name"),
            "formats": {key: form for key, form in (config.get("quantizer") or {}).items() if key != "name"},
            "dataset": config["dataset"].get("name"),
            "decoding": dict(config["decoding"]),
            "seed": config["runtime"].get("seed", 0),
            "batch_size": config["runtime"].get("batch_size", 1),
            "weights": rounded_weights(config),
        },
        "data": dict(data) if data else None,
        "code": counts,
        "sources": parts,
        "older": older,
        "samples": {
            "requested": requested,
            "done": len(rows),
            "truncated": sum(1 for row in rows if row.get("truncated")),
            "left_out": list(left_out),
            **({"too_long": {key: list(names) for key, names in too_long.items()}} if too_long else {}),
            "prompt_tokens": {
                "mean": _known_mean(row.get("prompt_tokens") for row in rows),
                "max": max((row.get("prompt_tokens") or 0 for row in rows), default=None),
            },
        },
        "scores": by_task,
        "mean": aggregate.overall(by_task),
        "baseline": pair.run_id if pair else None,
        "baseline_differs": unlike(rows, fp16_rows),
        "kv_bytes": aggregate.kv_bytes(rows),
        "peak_bytes": peak,
        "ttft_s": times["ttft_s"],
        "tpot_s": times["tpot_s"],
        "tokens_per_s": times["tokens_per_s"],
        "timings": devices,
        "attention": _attention_paths(rows),
        "speculation": speculation(rows, config["method"]),
        "oom": dict(oom) if oom is not None else None,
        "errors": [dict(error) for error in errors],
        "error": errors[-1]["message"] if errors else None,
        "env": dict(environment),
    }
    metrics |= headline(by_task)
    metrics["inter_token"] = inter_token.fit_record(metrics)
    if metrics["speculation"] and pair:
        add_speedups(metrics, pair.metrics())
    return record.checked(metrics)


def baseline(store: RunStore) -> RunStore | None:
    """Return the fp16 run with the same model, data, decoding options and seed; None if there is no such run."""
    for other in same_setting(store):
        config = other.config()
        if config is not None and is_baseline(config) and other.samples_path.is_file():
            return other
    return None


def pair_siblings(store: RunStore) -> int:
    """Add the differences from fp16 to the `metrics.json` of each run that finished before this fp16 run.

    If `store` is not an fp16 run, nothing is done. Runs that another process is working on are skipped, because that
    process adds the differences itself. A run is also skipped, with a message, if its `metrics.json` was not computed
    from the rows that it has now. The result is the number of updated files.
    """
    config = store.config()
    if config is None or not is_baseline(config):
        return 0
    rows = store.samples().rows
    count = 0
    for other in same_setting(store):
        metrics = other.metrics()
        if metrics is None or other.run_id == store.run_id:
            continue
        with suppress(KvbenchError), other.hold(timeout_s=0, quiet=True):
            counted = counted_rows(other, metrics)
            if counted is None:
                store.say(
                    f"run {other.run_id}: its scores do not cover its current rows; run its command again to update"
                    " its differences from fp16"
                )
                continue
            _add_pairs(metrics, counted, store, rows)
            other.write_metrics(record.checked({**metrics, "schema_version": record.SCHEMA_VERSION}))
            count += 1
    return count


def counted_rows(store: RunStore, metrics: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows from which a run's `metrics.json` was computed; None if the run now has more or fewer rows."""
    left_out = set(metrics["samples"].get("left_out") or ())
    rows = store.samples().rows.items()
    counted = [row for name, row in rows if not row.get("warm_up") and name not in left_out]
    return counted if len(counted) == metrics["samples"]["done"] else None


def _add_pairs(metrics: dict[str, Any], counted: Sequence[Row], baseline: RunStore, rows: Mapping[str, Row]) -> None:
    """Add the paired differences between `counted` and the fp16 run's `rows` to `metrics`, in place."""
    paired = aggregate.scores(counted, rows)
    for key, entry in metrics["scores"].items():
        if key not in paired:
            continue
        entry["vs_fp16"] = paired[key]["vs_fp16"]
        if entry["nll"] and paired[key]["nll"]:
            entry["nll"]["vs_fp16"] = paired[key]["nll"]["vs_fp16"]
        entry["perplexity"] = paired[key]["perplexity"]
        entry |= {name: paired[key][name] for name in ("points", "left", "kl_bound") if name in paired[key]}
    metrics["mean"] = aggregate.overall(metrics["scores"])
    metrics["baseline"] = baseline.run_id
    metrics["baseline_differs"] = unlike(counted, rows)
    if metrics.get("speculation"):
        add_speedups(metrics, baseline.metrics())


def same_setting(store: RunStore) -> list[RunStore]:
    """Return the runs of the same results directory with the same model, data, decoding options and seed."""
    setting = store.run_id.split("-", 1)[0]
    paths = sorted(store.path.parent.glob(f"{setting}-*"))
    return [store.sibling(path.name) for path in paths if path.is_dir()]


def older_code(
    counts: Mapping[str, int], parts: Mapping[str, Code], oom: Mapping[str, Any] | None, now: Code
) -> dict[str, Any] | None:
    """Return how many samples were produced by other code than the current one, and which parts of the code differ.

    See :func:`kvbench.results.code.older` for the other arguments and the result. `oom` is the record of an
    out-of-memory error, whose key ``code`` holds the digests of the code that ran; this code is compared too. None if
    memory did not run out.
    """
    rows = older(counts, parts, now)
    names = changed(oom.get("code"), now) if oom else []
    if not names:
        return rows
    rows = rows or {"samples": 0, "parts": []}
    return {**rows, "parts": sorted({*rows["parts"], *names}, key=order)}


def _attention_paths(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``{reads_packed, path}``: whether attention read packed codes, and all rows' paths, joined by ``+``."""
    seen = [row[MEASURED]["attention"] for row in rows if row.get(MEASURED, {}).get("attention")]
    paths = sorted({part for item in seen for part in item["path"].split("+")})
    paths = [path for path in paths if path != "none"] or paths
    return {
        "reads_packed": any(item["reads_packed"] for item in seen) if seen else None,
        "path": "+".join(paths) if paths else None,
    }


def _known_mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
