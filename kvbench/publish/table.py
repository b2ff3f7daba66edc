"""The table of a sweep in Weights & Biases: a line per job, with units that a chart can show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.loggers.base import MIB
from kvbench.results.ranking import front
from kvbench.results.store import DONE
from kvbench.results.sweeps import Progress

#: columns of the table
COLUMNS = (
    "job",
    "label",
    "state",
    "status",
    "run",
    "model",
    "method",
    "quantizer",
    "dataset",
    "score",
    "score stderr",
    "difference from fp16",
    "difference stderr",
    "perplexity",
    "samples",
    "KV MiB",
    "times smaller than fp16",
    "peak MiB prefill",
    "peak MiB decode",
    "TTFT ms",
    "TPOT ms",
    "TPOT ms p99",
    "tokens per s",
    "on the Pareto front",
    "command",
)


def sweep_job_lines(entries: Sequence[Progress]) -> list[dict[str, Any]]:
    """Return a line per job of a sweep, as dicts with the keys :data:`COLUMNS`.

    A run is on the Pareto front if no run of the same model and data has a better score (or perplexity) in fewer bytes.
    """
    table = [_job_line(entry) for entry in entries]
    groups: dict[Any, list[int]] = {}
    for i, (line, entry) in enumerate(zip(table, entries, strict=True)):
        if line["KV MiB"] is not None and quality(line) is not None and line["status"] in DONE:
            groups.setdefault(str(entry.run_id).partition("-")[0], []).append(i)
    for places in groups.values():
        higher = table[places[0]]["score"] is not None
        alike = [i for i in places if (table[i]["score"] is not None) == higher]
        for i in alike:
            table[i]["on the Pareto front"] = False
        for place in front([(table[i]["KV MiB"], quality(table[i])) for i in alike], higher):
            table[alike[place]]["on the Pareto front"] = True
    return table


def quality(line: Mapping[str, Any]) -> Any:
    """Return the score of a line, or else its perplexity; None without either."""
    return line["perplexity"] if line["score"] is None else line["score"]


def _job_line(entry: Progress) -> dict[str, Any]:
    metrics = entry.metrics or {}
    config, mean = metrics.get("config") or {}, metrics.get("mean") or {}
    pair = mean.get("vs_fp16") or {}
    sizes, peak = metrics.get("kv_bytes") or {}, metrics.get("peak_bytes") or {}
    tpot = metrics.get("tpot_s") or {}
    texts = [score["perplexity"]["ppl"] for score in (metrics.get("scores") or {}).values() if score.get("perplexity")]
    values = (
        entry.job.number + 1,
        entry.job.label,
        entry.state,
        metrics.get("status") or entry.status,
        entry.run_id,
        config.get("model"),
        str(metrics.get("label") or "").partition(" ")[0] or None,
        config.get("quantizer"),
        config.get("dataset"),
        mean.get("score"),
        mean.get("stderr"),
        pair.get("diff"),
        pair.get("stderr"),
        texts[0] if len(texts) == 1 else None,
        (metrics.get("samples") or {}).get("done"),
        _scaled((sizes.get("used") or {}).get("total"), 1 / MIB),
        sizes.get("ratio"),
        _scaled(peak.get("prefill"), 1 / MIB),
        _scaled(peak.get("decode"), 1 / MIB),
        _scaled((metrics.get("ttft_s") or {}).get("median"), 1000),
        _scaled(tpot.get("median"), 1000),
        _scaled(tpot.get("p99"), 1000),
        metrics.get("tokens_per_s"),
        None,
        shlex.join(["python", "-m", "kvbench", *entry.job.overrides]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
