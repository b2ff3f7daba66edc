"""The stored rows of a stage as ``results/smollm2/STAGE/figures.json``: figures, their spread, and what they rest on.

Figures of single windows or prompts are kept, so that the file has the paired difference of any two settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fold.figures import FIGURES, Statistic, per_token
from experiments.measured import Folded, Stored
from experiments.real.stages import PYTHON, Stage
from experiments.stored import as_json, content, markdown_table
from kvbench.errors import DataError
from kvbench.metrics import intervals
from kvbench.results import fidelity_fold
from kvbench.results.points import halves
from kvbench.results.samples import MEASURED, Row

#: figures of each kind of row: name in the file, and name among the figures of items. Rows with scores also have the
#: likelihood of their reference answers, and rows of perplexity have no scores
KINDS = {"fidelity": ("kl", "flips"), "scores": ("score",), "nll": ("perplexity",)}
FILE = "figures.json"
#: below a table of scores
UNPAIRED = (
    "± is of each setting's own prompts: no two settings are paired here. Where all scores are alike, it is a share's."
)
#: digits of the figures of single windows
DIGITS = 5


def fold_stage(stored: Mapping[str, Stored], stage: Stage, about: Mapping[str, Any]) -> Folded:
    """Return a stage's file and its table; settings and single runs without a row are named."""
    lines = []
    for setting in stage.settings:
        runs = {name: run_figures(rows.values()) for name, rows in getattr(stored.get(setting.key), "rows", {}).items()}
        runs = {name: figures for name, figures in runs.items() if figures["n"]}
        if runs:
            lines.append({"name": setting.name, "family": setting.family, "setting": setting.setting, "runs": runs})
    if not lines:
        return Folded(f"{stage.name}: nothing was run")
    machines = [machine(done.env) for done in stored.values() if done.env]
    whole = {
        "stage": stage.name,
        "about": stage.about,
        **about,
        "machine": max(machines, key=machines.count, default={}),
        "missing": missing_runs([setting.key for setting in stage.settings if setting.key in stored], lines),
        "lines": lines,
    }
    return Folded(stage_markdown(whole), {FILE: as_json(whole)}, counts(whole))


def missing_runs(keys: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that have no line, and behind those that have one the runs that others have and they lack."""
    by_key = {line["name"]: line for line in lines}
    names = list(dict.fromkeys(name for line in lines for name in line["runs"]))
    lost = {key: [name for name in names if name not in by_key[key]["runs"]] for key in keys if key in by_key}
    texts = {key: f"{key} ({', '.join(runs)})" for key, runs in lost.items() if runs}
    return [texts.get(key, key) for key in keys if key not in by_key or key in texts]


def counts(whole: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of samples behind each figure of a stage's file."""
    return {
        f"{line['name']}, {name}": figures["n"] for line in whole["lines"] for name, figures in line["runs"].items()
    }


def counts_before(folder: Path) -> dict[str, int] | None:
    """Return the samples that a stored file of a stage rests on; None without one."""
    return counts(stage_content(folder / FILE)) if (folder / FILE).exists() else None


def stage_content(path: Path) -> Mapping[str, Any]:
    """Return the content of a stage's file.

    Raises:
        DataError: it is damaged, or another file.
    """
    whole = content(path)
    lines = whole.get("lines") if isinstance(whole, dict) and whole.keys() >= {"about", "model", "missing"} else None
    parts = {"name", "family", "setting", "runs"}
    if not lines or not all(isinstance(line, dict) and line.keys() >= parts and line["runs"] for line in lines):
        hint = "restore it (git checkout), or delete it and make it again"
        raise DataError(f"{path} is damaged: not the figures of a stage.\n  hint: {hint}")
    return dict(whole)


def run_figures(rows: Sequence[Row] | Any) -> dict[str, Any]:
    """Return the figures of one run: values, 95 % intervals, the figure of each sample, devices, bytes of a cache."""
    chosen = sorted((row for row in rows if not row.get("warm_up")), key=lambda row: str(row["id"]))
    kind = next((kind for kind in KINDS if chosen and chosen[0].get(kind)), None)
    if kind is None:
        return {"n": 0}
    out: dict[str, Any] = {"n": len(chosen)}
    if devices := sorted({device for row in chosen if (device := (row.get(MEASURED) or {}).get("device"))}):
        out["devices"] = devices
    for name in KINDS[kind]:
        figure = FIGURES[name](chosen)
        if figure is not None:
            out[name] = spread(figure)
    if kind == "fidelity":
        klds = np.concatenate([row["fidelity"]["kld"] for row in chosen])
        out |= {"p99_9": rounded(np.percentile(klds, 99.9)), "median": rounded(np.median(klds)), "tokens": len(klds)}
        for name, key in (("ppl", "nll"), ("ppl_fp16", "nll_base")):
            out[name] = rounded(np.exp(np.mean(np.concatenate([row["fidelity"][key] for row in chosen]))))
        loss = per_token(
            [np.subtract(*(row["fidelity"][key] for key in ("nll", "nll_base"))).tolist() for row in chosen]
        )
        out["loss"] = spread(loss)
        out["samples"] = [rounded(np.mean(row["fidelity"]["kld"])) for row in chosen]
        out["same"] = [rounded(np.mean(fidelity_fold.same_top(row))) for row in chosen]
    elif kind == "nll":
        out["samples"] = [rounded(row["nll"]["sum"] / row["nll"]["n"]) for row in chosen]
    else:
        out["samples"] = [rounded(row["scores"]["score"]) for row in chosen]
        out["score"] = score_spread(out["score"], out["samples"])
    if kind == "scores":  # the others' caches store 32 bits
        out |= bill_sizes(chosen)
    return out


def bill_sizes(chosen: Sequence[Row]) -> dict[str, float]:
    """Return the mean bytes of a cache at the end of a sample, and how many times more fp16 would hold."""
    bills = [row["kv_bytes"] for row in chosen if row.get("kv_bytes")]
    used = [bill["used"]["total"] for bill in bills]
    if not used or len(used) < len(chosen):
        return {}
    full = [bill["fp16_equivalent"] * halves(row) for bill, row in zip(bills, chosen, strict=True)]
    return {"bytes": rounded(np.mean(used), 8), "ratio": rounded(sum(full) / sum(used))}


def spread(figure: Statistic) -> dict[str, float | None]:
    """Return a figure with its 95 % interval over samples."""
    low, high = intervals.centred(figure.value, figure.influences) or (None, None)
    return {"value": rounded(figure.value), "low": low and rounded(low), "high": high and rounded(high)}


def score_spread(figure: Mapping[str, float | None], scores: Sequence[float]) -> dict[str, float | None]:
    """Return a mean score with its interval, which lies in 0 to 1 (:func:`kvbench.metrics.intervals.of_scores`)."""
    known = intervals.of_scores(scores)
    return dict(figure) if known is None else {**figure, "low": rounded(known[0]), "high": rounded(known[1])}


def rounded(value: Any, digits: int = DIGITS) -> float:
    """Return a number with so many significant digits."""
    return float(f"{float(value):.{digits}g}")


def machine(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return what made the rows: device, number of processors and versions."""
    hardware = ("device", "device_name", "cpu", "cpu_count", "arithmetic", "dequantized")
    return {name: env[name] for name in (*hardware, "python", "torch", "transformers", "commit") if env.get(name)}


def stage_markdown(whole: Mapping[str, Any]) -> str:
    """Return the table of a stage's file: a line for each setting, a column for each figure of each run."""
    names = list(dict.fromkeys(name for line in whole["lines"] for name in line["runs"]))
    head, body = ["setting"], [[line["name"].replace("|", r"\|")] for line in whole["lines"]]
    for name in names:
        figures = [line["runs"].get(name, {}) for line in whole["lines"]]
        for key, title, write in COLUMNS:
            if any(key in figure for figure in figures):
                head.append(f"{name}: {title} (n = {max(figure.get('n', 0) for figure in figures)})")
                for cells, figure in zip(body, figures, strict=True):
                    cells.append(write(figure[key]) if key in figure else "-")
    about = whole["about"]
    text = f"{about[0].upper()}{about[1:]}.\n\n" + "\n".join(markdown_table(head, body)) + "\n"
    missing = whole["missing"]
    text += f"\nMeasured on {measured_on(whole)}.{fewer(whole)}\n"
    if any("score" in figures for line in whole["lines"] for figures in line["runs"].values()):
        text += f"\n{UNPAIRED}\n"
    return text + (f"\nNot run: {', '.join(missing)}.\n" if missing else "")


def fewer(whole: Mapping[str, Any]) -> str:
    """Return a sentence on the runs that have fewer samples than their column's heading says; empty without any."""
    most: dict[str, int] = {}
    for line in whole["lines"]:
        for name, figures in line["runs"].items():
            most[name] = max(most.get(name, 0), figures["n"])
    short_runs = [
        f"{line['name']} ({name}: {figures['n']})"
        for line in whole["lines"]
        for name, figures in line["runs"].items()
        if figures["n"] < most[name]
    ]
    return f" With fewer samples: {', '.join(short_runs)}." if short_runs else ""


def measured_on(whole: Mapping[str, Any]) -> str:
    """Return the devices that made a stage's rows; of all but the one with most runs, which runs they made.

    Behind them stands the version of Python whose own texts were read, if any were.
    """
    made: dict[str, list[str]] = {}
    for line in whole["lines"]:
        for name, figures in line["runs"].items():
            for device in figures.get("devices") or [whole["machine"].get("device_name") or "an unknown machine"]:
                made.setdefault(device, []).append(f"{line['name'].partition(' | ')[0]} ({name})")
    first, *others = sorted(made, key=lambda device: -len(made[device]))
    devices = "; ".join([first, *(f"on {device}: {', '.join(made[device])}" for device in others)])
    read = [text["name"] for text in whole.get("texts", ())][:1]  # the only one, where runs are not named by texts
    read += [name for line in whole["lines"] for name in line["runs"]]
    own = any(name.startswith(PYTHON.name) for name in read) and whole["machine"].get("python")
    return f"{devices}; {PYTHON.name} are those of Python {own}" if own else devices


def with_interval(figure: Mapping[str, float | None], factor: float = 1.0) -> str:
    """Return a value in three digits, with the distance to the farther end of its interval in two."""
    value = factor * float(figure["value"] or 0.0)
    if figure["low"] is None or figure["high"] is None:
        return short(value)
    reach = max(value - factor * figure["low"], factor * figure["high"] - value)
    return f"{short(value)} ±{short(reach, 2)}"


def short(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, without an exponent where it is readable."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


#: key of a run's figures, heading, and how it is written
COLUMNS = (
    ("kl", "KL, nats", with_interval),
    ("p99_9", "KL 99.9 %", short),
    ("flips", "flips, %", partial(with_interval, factor=100.0)),
    ("ppl", "perplexity of these tokens", short),
    ("perplexity", "perplexity", with_interval),
    ("score", "score, %", partial(with_interval, factor=100.0)),
    ("ratio", "fp16's bytes to its", short),
)


def difference(
    first: Mapping[str, Any], second: Mapping[str, Any], key: str = "samples"
) -> tuple[float, tuple[float, float] | None, int]:
    """Return the mean of `first` less `second` over the samples that both runs have, its interval, and their number."""
    count = min(len(first[key]), len(second[key]))
    gaps = [a - b for a, b in zip(first[key][:count], second[key][:count], strict=True)]
    mean = float(np.mean(gaps))
    return mean, intervals.centred(mean, gaps), count


def by_name(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the line of a stage's file with a name; empty where there is none."""
    return next((line for line in whole["lines"] if line["name"] == name), {})
