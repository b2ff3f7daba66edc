"""Sending of a sweep to Weights & Biases as a run of its own: the table of its jobs, plots, and a report.

The table has a line per job, with units that a chart can show.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.report_page import reader
from kvbench.cli.report_runs import results_above
from kvbench.errors import KvbenchError
from kvbench.loggers.base import MIB
from kvbench.loggers.wandb import SweepContent, log_sweep
from kvbench.loggers.wandb_service import Service
from kvbench.page.data import Report
from kvbench.page.server import html
from kvbench.publish.runs import Outcome, as_asked, guarded
from kvbench.results import deliveries
from kvbench.results.identity import content_digest
from kvbench.results.ranking import front
from kvbench.results.store import DONE, RunStore
from kvbench.results.sweeps import MANIFEST, Progress, Sweep
from kvbench.util.requirements import installed

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
    """Return the score of a line, or else its perplexity; None if it has neither."""
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


#: files of a sweep that are sent as an artifact, beside the records of its jobs
FILES = (MANIFEST, "table.md", "table.csv")


def send_sweep(
    sweep: Sweep, stores: Sequence[RunStore], folder: Path, service: Service, *, again: bool = False
) -> Outcome:
    """Send a sweep's own run unless the destination has it already; print what was done, or why it was not sent.

    `stores` are the sweep's runs, and `folder` is that of all runs. `again` sends it even if the destination has it
    already.
    """
    try:
        return guarded(f"sweep {sweep.manifest.id}", lambda: _send(sweep, stores, folder, service, again))
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return "failed"


def run_id(sweep: Sweep) -> str:
    """Return the id of the sweep's run in W&B; it also differs between sweeps of the same name on two machines."""
    return f"sweep-{re.sub(r'[^A-Za-z0-9_.-]', '-', sweep.manifest.id)[:80]}-{content_digest(sweep.manifest.token)[:6]}"


def _send(sweep: Sweep, stores: Sequence[RunStore], folder: Path, service: Service, again: bool) -> Outcome:
    manifest = sweep.manifest
    entries = sweep.progress()
    lines = sweep_job_lines(entries)
    digest = content_digest(lines)
    if not again and deliveries.sent(sweep.folder).get(as_asked(service)) == digest:
        print(f"sweep {manifest.id}: already sent")
        return "known"
    quality = "score" if any(line["score"] is not None for line in lines) else "perplexity"
    points = [line for line in lines if line["KV MiB"] is not None and line[quality] is not None]
    methods = dict.fromkeys(line["method"] for line in lines if line["method"])
    with tempfile.TemporaryDirectory() as scratch:
        data = _data(stores, folder) if stores else None
        content = SweepContent(
            id=manifest.id,
            run_id=run_id(sweep),
            config={
                "sweep": manifest.id,
                "command": shlex.join(["python", "-m", "kvbench", *manifest.command]),
                "created": manifest.created,
                "launcher": manifest.launcher,
                "jobs": len(manifest.jobs),
            },
            tags=list(methods),
            counts={str(state): count for state, count in sweep.counts().items()},
            table=lines,
            pareto=("KV MiB", quality) if points else None,
            page=html(data) if data else "",
            plots=_plots(data, Path(scratch)) if data else {},
            files=[*(sweep.folder / name for name in FILES), *sorted(sweep.folder.glob("job-*.json"))],
        )
        log_sweep(service, content)
    deliveries.record_delivery(sweep.folder, as_asked(service), digest, service.local)
    print(f"sweep {manifest.id}: sent, {service.place}")
    return "sent"


def _data(stores: Sequence[RunStore], folder: Path) -> dict[str, Any]:
    """Return the data of the report page for the runs in `stores`."""
    report = Report(lambda: stores, reader(), folder, results_above(folder), say=lambda line: None)
    return report.data()


def _plots(data: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Draw the plots of the page as pictures, and return them by name; empty, with a message, without matplotlib."""
    if not installed("matplotlib"):
        print("note: the plots are sent as a chart and in the page only; pictures need kvbench[plot]", file=sys.stderr)
        return {}
    from kvbench.page.figures import write_plots

    _, files = write_plots(data, folder)
    return {file.stem: file for file in files if file.suffix == ".png"}
