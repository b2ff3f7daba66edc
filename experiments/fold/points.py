"""Points of time and memory that were measured on another machine: JSON files of ``kvbench.bench memory | tpot``.

``python -m kvbench.bench memory --model llama2-7b --settings ... --out results/h200/papers --name NAME`` writes such a
file; every file of :data:`FOLDERS` is read, and a later folder or name wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiments import published, stored
from experiments.data import Plan
from experiments.fold.analytic import length
from experiments.fold.cells import OUT_OF_MEMORY, Cell, Folded, Heading, Verdict
from experiments.fold.claims import decided
from experiments.fold.grid import Source
from experiments.item import Column, Computed
from kvbench.bench.choices import shape_of
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError
from kvbench.profiling.roofline import Shape
from kvbench.tasks.efficiency import point_id

#: when the kernel for products of 2 to 16 rows was measured, and the note of such steps from before, which are slower
PRODUCTS, OLDER = "2026-11-22 21:30", "older products of 2 to 16 rows"
#: when the CUDA kernel read LogQuant's W = 42, and the note of steps from before, which Triton's kernel read, slower
WINDOWS, TRITON = "2026-11-22 18:30", "Triton's kernel"
FOLDERS = tuple(stored.ROOT / "results" / "h200" / name for name in ("whole", "papers"))
Key = tuple[Shape, str, int, int, float | None]


def point_source(model: str, setting: str, column: Column, folders: tuple[Path, ...] = FOLDERS) -> Source | None:
    """Return the source of a column's point; None if no file has it. Above a batch that ran out of memory, all did.

    The points of a model with the same dimensions are the model's points too, and settings that are written differently
    but choose the same are the same.
    """
    by_key, chosen, shape = stored_points(folders), canonical(setting), shape_of(model)
    source = by_key.get((shape, chosen, column.prompt, column.batch, column.memory_gb))
    if source is not None:
        return source
    ended = [
        (key[3], source)
        for key, source in by_key.items()
        if (*key[:3], key[4]) == (shape, chosen, column.prompt, column.memory_gb)
        and source.reason.startswith(OUT_OF_MEMORY)
    ]
    smaller = [pair for pair in ended if pair[0] < column.batch]
    return min(smaller, key=lambda pair: pair[0])[1] if smaller else None


@cache
def canonical(setting: str) -> str:
    """Return a text that two settings share if they choose the same, however they are written.

    Raises:
        ConfigError: the text is not a setting, such as the name of a cache of stock transformers.
    """
    method = parse_setting(setting).load()
    name = type(method).__name__
    return repr((name, sorted(method.hyperparameters().items(), key=str), method.quantizer))


@cache
def stored_points(folders: tuple[Path, ...]) -> Mapping[Key, Source]:
    """Return the points of all files in some folders, by :data:`Key`: dimensions, setting, prompt, batch, limit in GiB.

    A point that ran out of memory is a source without rows whose reason says so.
    """
    by_key: dict[Key, Source] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*.json"))]:
        content = stored.content(path)
        for record in content.get("rows", ()):
            try:
                limit = content.get("memory_limit_gb")
                setting = canonical(record["setting"])
                key = (shape_of(content["model"]), setting, record["prompt"], record["batch"], limit)
            except (KeyError, ConfigError):
                continue  # another command's file, or a cache of stock transformers
            by_key[key] = _record_source(path, content, record)
    return by_key


def _record_source(path: Path, content: Mapping[str, Any], record: Mapping[str, Any]) -> Source:
    device = str(content.get("device", ""))
    older = 2 <= record["batch"] <= 16 and str(content.get("date", PRODUCTS)) < PRODUCTS
    kernel = TRITON if record.get("path") == "triton" and str(content.get("date", WINDOWS)) < WINDOWS else ""
    parts = (device, record.get("stepping", "").split(" (")[0], kernel, OLDER if older else "")
    note = ", ".join(part for part in parts if part)
    if record["status"] != "ok":
        ended = OUT_OF_MEMORY if record["status"] == "oom" else record["status"]
        return Source({}, (path.name,), f"{ended} on {device}", note)
    name = point_id(record["prompt"], record["batch"])  # as in a run: points of several files are compared
    return Source({name: {"id": name, "measured": {"point": record}}}, (path.name,), "", note)


def latencies(item: Computed, plan: Plan, folder: Path = FOLDERS[-1]) -> Folded:
    """Return milliseconds by kernel and context, with the speed-up over FlashAttention in 16 bits.

    The item's options name the file, the shape of heads, the contexts, and for each row the format; ``flash`` is
    torch's FlashAttention over keys and values in 16 bits.
    """
    options = item.options
    path = folder / f"{options['file']}.json"
    content = stored.content(path) if path.exists() else {}
    same = not plan.models or list(plan.models) == [model.preset for model in item.models]
    missing = f"not measured: python -m kvbench.bench kernel needs a GPU ({options['file']}.json)"
    reason = missing if same else "one layer of the paper's shape is measured, whatever the model"
    headings, cells, verdicts = [], [], []
    title = plan.models_of(item)[0].title
    for context in options["contexts"]:
        name = length(context)
        headings.append(Heading(name, "ms", 3))
        base = _us(content, options, "flash", context) if same else None
        for row, (kernel, form) in options["rows"].items():
            us = _us(content, options, form, context) if same else None
            number, ratio = (
                published.lookup(item.published, {"kernel": kernel, "context": name}, column)
                for column in ("latency_ms", "speedup")
            )
            place = (title, row, name, number)
            if us is None:
                cells.append(Cell(*place, reason=reason))
                continue
            note = "" if base is None or form == "flash" else f"{base / us:.2f} times as fast as FlashAttention"
            cells.append(Cell(*place, ours=us / 1000, n=1, runs=(path.name,), note=note))
            if base is not None and form != "flash" and ratio is not None:
                verdicts.append(_verdict(f"{row} at {name}: {ratio:g} times as fast", title, ratio, base / us))
    notes = []
    if same and content:
        best = ", ".join(f"{length(c)} {_us(content, options, 'cudnn', c):.0f} us" for c in options["contexts"])
        notes = [f"Measured on: {content['device']}. The fastest 16-bit attention of torch there is cuDNN's: {best}."]
    return Folded(headings, list(options["rows"]), [title], cells, verdicts=verdicts, notes=notes)


def _us(content: Mapping[str, Any], options: Mapping[str, Any], form: str, context: int) -> float | None:
    """Return the microseconds of a format, or of a back end of torch, at batch 1 with one new token."""
    place = f"{options['shape']} B1 {length(context)} q1"
    baseline = content.get("baselines", {}).get(place, {}).get(form)
    if isinstance(baseline, Mapping):
        return float(baseline["us"])
    for row in content.get("rows", ()):
        at = (row["model"], row["batch"], row["context"], row["q_len"], row["format"])
        if at == (options["shape"], 1, context, 1, form) and "us" in row:
            return float(row["us"])
    return None


def _verdict(claim: str, model: str, paper: float, ours: float) -> Verdict:
    """Return whether a speed-up is at least the paper's, less a tenth."""
    return decided(claim, model, ours, 0.9 * paper, float("inf"), n=1, unit="factor", paper=paper)
