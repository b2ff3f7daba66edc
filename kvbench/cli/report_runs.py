"""Stored runs as the report shows them: status for the present code, and what is known of unfinished runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, nearest
from kvbench.results import code as codes
from kvbench.results import ranking
from kvbench.results.columns import UNFINISHED
from kvbench.results.store import DONE, RunStore
from kvbench.results.sweeps import Sweep
from kvbench.runner import sources

#: default folder of the runs
RUNS = Path("results/runs")
#: groups of a configuration that a line of the list is computed from
GROUPS = ("model", "method", "quantizer", "dataset", "decoding", "runtime")


def marked(
    store: RunStore,
    metrics: dict[str, Any],
    config: dict[str, Any] | None = None,
    code: Callable[[Mapping[str, Any]], codes.Code] = sources.code,
) -> dict[str, Any]:
    """Return a run's metrics with ``status`` and ``older`` updated by comparing its code with the present code.

    ``older`` says how many samples were made by older code, and which parts of the code have changed since; it is None
    if there are no such samples. The metrics are returned unchanged if the run's `config.yaml` is missing or
    incomplete.

    Args:
        config: the content of the run's `config.yaml`; None to read the file here.
        code: function that takes a configuration and returns digests of the present source code that it would run.
    """
    config = config or store.config()
    if config is None or any(not isinstance(config.get(group), dict) for group in GROUPS):
        return metrics
    counts = metrics["code"] or ({codes.UNKNOWN: metrics["samples"]["done"]} if metrics["samples"]["done"] else {})
    storage = codes.stored_in((metrics.get("env") or {}).get("dtype"))
    parts = {name: {**storage, **known} for name, known in metrics["sources"].items()}
    older = codes.older(counts, parts, code(config))
    status = metrics["status"]
    if status in DONE:
        status = "older" if older else "ok"
    return {**metrics, "status": status, "older": older}


def begun(store: RunStore, code: Callable[[Mapping[str, Any]], codes.Code] = sources.code) -> dict[str, Any]:
    """Return provisional metrics of a run that has no valid `metrics.json`, so that lists can include the run.

    They are derived from `config.yaml` and the samples stored so far; `code` is as in :func:`marked`.
    """
    written = store.config() or {}
    config = {group: value if isinstance(value := written.get(group), dict) else {} for group in GROUPS}
    try:
        rows = list(store.samples().rows.values())
    except KvbenchError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        rows = []
    counts, parts = codes.kinds(rows)
    samples = {"done": len(rows), "requested": None, "truncated": 0}
    older = codes.older(counts, parts, code(config))
    return {
        **ranking.failed(config, ""),
        "run_id": store.run_id,
        "status": UNFINISHED,
        "samples": samples,
        "code": counts,
        "sources": parts,
        "older": older,
    }


def find_run(stores: Sequence[RunStore], name: str) -> RunStore:
    """Return the run whose id, or its second half, begins with `name`; raise KvbenchError unless exactly one does."""
    if not name:
        raise KvbenchError("the name of a run is empty.\n  hint: python -m kvbench.report lists all runs")
    matches = [s for s in stores if s.run_id.startswith(name) or s.run_id.partition("-")[2].startswith(name)]
    exact = [s for s in matches if s.run_id == name]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    ids = [store.run_id for store in (matches or stores)]
    if matches:
        raise KvbenchError(
            f"{name} matches {len(matches)} runs: {', '.join(ids)}.\n  hint: type more characters of the run id"
        )
    near = nearest(name, ids)
    raise KvbenchError(
        f"there is no run {name}."
        + (f"\n  hint: did you mean {near}?" if near else "\n  hint: python -m kvbench.report lists all runs")
    )


def results_above(runs: Path) -> Path:
    """Return the folder with the papers' numbers and the sweeps.

    It is the nearest folder ``results`` above `runs`; if there is none, the parent of `runs`.
    """
    return next((folder for folder in runs.absolute().parents if folder.name == "results"), runs.parent)


def runs_of(sweep: Sweep, results: Path) -> Path:
    """Return the folder of a sweep's runs: the one that its command named, unless ``--results`` names another.

    `results` is :data:`RUNS` if the user did not give the option.
    """
    named = Path(sweep.manifest.results_dir)
    return named if results == RUNS and named.is_dir() else results


class Code:
    """Callable that takes a configuration and returns digests of the present source code that it would run.

    Configurations share cached digests if they name the same classes of methods and data sets, and if both or neither
    use a quantizer. Use a new instance for each report, because an instance does not notice later changes of the source
    files.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], codes.Code] = {}

    def __call__(self, config: Mapping[str, Any]) -> codes.Code:
        """Return the digests for a configuration (:func:`kvbench.runner.sources.code`)."""
        quantizer = (config.get("quantizer") or {}).get("name")
        targets = (str(sources.targets(config, group)) for group in ("method", "dataset"))
        key = (*targets, str(quantizer in (None, "none")), str(codes.storage_now(config)))
        if key not in self._known:
            self._known[key] = sources.code(config)
        return self._known[key]
