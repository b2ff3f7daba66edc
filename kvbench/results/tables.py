"""Runs as a table: on the screen, as markdown, as CSV; one run, or all runs of a sweep.

A cell of a score is two lines: the score with its standard error, and below it the paired difference to fp16 with its
own. Where there are more tasks than columns fit, runs and tasks change places.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvbench.results import points_table, shape
from kvbench.results.code import shown
from kvbench.results.findings import findings
from kvbench.results.load import busyness
from kvbench.results.points import has_points
from kvbench.util.cells import Cell, seconds, size

Metrics = Mapping[str, Any]

#: narrowest and widest screen that a table is laid out for
MIN_WIDTH, MAX_WIDTH = 80, 160

#: widest column of names, and the space between columns
_LABEL, _GAP = 34, 2

#: keys of a method's group that are no hyper-parameters
UNSAID = ("_target_", "takes", "preset")

_COSTS = ("KV", "ratio", "peak", "TTFT", "TPOT")
_DRAFTS = ("accepted", "speed-up")


def summary(runs: Sequence[Metrics], width: int | None = None, *, color: bool | None = None) -> str:
    """The table of a sweep (or of one run) as text for a terminal, with what must be said below it.

    Args:
        runs: contents of `metrics.json` (with ``run_dir``, as `run` returns them, they are read again, since an fp16
            run that came later gives earlier ones their paired differences).
        width: columns of the screen; the terminal's where None.
        color: None: as the terminal can.
    """
    runs = [reread(run) for run in runs]
    width = max(MIN_WIDTH, min(MAX_WIDTH, width or shutil.get_terminal_size((120, 24)).columns))
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=color, highlight=False)
    console.print(screen(runs, width))
    for line in notes(runs):
        console.print(Text(line, style="dim"))
    if len(runs) > 1:
        for line in findings(labels(runs), runs):
            console.print(Text(line))
    return buffer.getvalue().rstrip("\n")


def screen(runs: Sequence[Metrics], width: int = 120) -> Group:
    """A line of cells per run where that fits, else one per task with the runs side by side, else several tables."""
    header, body = grid(runs)
    across = _transposed(header, body)
    for (names, lines), gap in itertools.product(((header, body), across), (_GAP, 1)):
        if _needed(names, lines, gap) <= width:
            return Group(_table(names, lines, range(len(names)), gap))
    return Group(*(_table(header, body, block) for block in _blocks(_widths(header, body), width)))


def _blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Columns of each of several tables, the first one in all of them: as few as fit, and as equally wide as can be."""
    # of the columns up to each one: how many blocks, the sum of their squared widths, and the blocks
    best: list[tuple[int, int, list[list[int]]]] = [(0, 0, [])]
    for last in range(1, len(widths)):
        choices = []
        for first in range(1, last + 1):
            needed = widths[0] + sum(widths[first : last + 1]) + _GAP * (last - first + 1)
            if needed <= width or first == last:
                count, squares, blocks = best[first - 1]
                choices.append((count + 1, squares + needed**2, [*blocks, [0, *range(first, last + 1)]]))
        best.append(min(choices))
    return best[-1][2] or [[0]]


def _table(header: Sequence[str], body: Sequence[Sequence[Cell]], block: Sequence[int], gap: int = _GAP) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for index in block:
        first = index == 0
        justify: Any = "left" if first else "right"
        table.add_column(header[index], justify=justify, max_width=_LABEL if first else None, no_wrap=not first)
    for line in body:
        table.add_row(*(_drawn(line[index]) for index in block))
    return table


def markdown(runs: Sequence[Metrics]) -> str:
    """The same cells as a GitHub table; a difference stands behind its score in brackets."""
    header, body = grid([reread(run) for run in runs])
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    for line in body:
        cells = [cell.main + (f" ({cell.detail})" if cell.detail else "") for cell in line]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines) + "\n"


def to_csv(runs: Sequence[Metrics]) -> str:
    """One line per run with plain numbers (bytes, seconds), for a spreadsheet or pandas."""
    runs = [reread(run) for run in runs]
    if any(map(has_points, runs)):
        return points_table.to_csv(runs, labels(runs))
    keys = _tasks(runs)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    score_columns = ("score", "stderr", "n", "vs_fp16", "vs_fp16_stderr", "nll", "ppl", "bits_per_byte")
    writer.writerow(
        ["run", "run_id", "status", *(f"{key} {name}" for key in keys for name in score_columns)]
        + ["kv_bytes", "kv_reserved", "kv_ratio", "peak_prefill", "peak_decode", "peak_kind", "peak_rss"]
        + ["ttft_s", "tpot_s", "tpot_p99_s", "tokens_per_s", "device"]
        + ["acceptance_rate", "acceptance_stderr", "tokens_per_round", "speedup"]
    )
    for name, run in zip(labels(runs), runs, strict=True):
        line: list[Any] = [name, run["run_id"], run["status"]]
        for key in keys:
            entry = run["scores"].get(key) or {}
            pair = entry.get("vs_fp16") or {}
            line += [entry.get("score"), entry.get("stderr"), entry.get("n"), pair.get("diff"), pair.get("stderr")]
            line.append((entry.get("nll") or {}).get("mean"))
            line += [(entry.get("perplexity") or {}).get(name) for name in ("ppl", "bits_per_byte")]
        kv, peak = run["kv_bytes"], run["peak_bytes"]
        line += [kv["used"]["total"], kv["reserved"]["total"], kv["ratio"]]
        line += [peak["prefill"], peak["decode"], peak["kind"], peak["rss"]]
        line += [run["ttft_s"]["median"], run["tpot_s"]["median"], run["tpot_s"]["p99"], run["tokens_per_s"]]
        found = run.get("speculation") or {}
        line += [run["env"].get("device_name"), found.get("acceptance_rate"), found.get("stderr")]
        writer.writerow([*line, found.get("tokens_per_round"), found.get("speedup")])
    return buffer.getvalue()


def grid(runs: Sequence[Metrics]) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells: a line per run; columns are the run, its tasks, their mean, and what it costs."""
    if any(map(has_points, runs)):
        return points_table.grid(runs, labels(runs))
    keys = _tasks(runs)
    # perplexities have no mean
    with_mean = sum(any((run["scores"].get(key) or {}).get("score") is not None for run in runs) for key in keys) > 1
    drafted = any(run.get("speculation") for run in runs)
    header = ["", *keys, *(["mean"] if with_mean else []), *_COSTS, *(_DRAFTS if drafted else ())]
    body = []
    for name, run in zip(labels(runs), runs, strict=True):
        line = [Cell(name, "" if run["status"] == "ok" else _status(run))]
        line += [_score(run["scores"].get(key)) for key in keys]
        line += [_score(run["mean"])] if with_mean else []
        body.append(line + _costs(run) + (_drafts(run) if drafted else []))
    return header, body


def labels(runs: Sequence[Metrics], beside: Sequence[str] = ()) -> list[str]:
    """Names that tell the runs apart: method and quantizer, and whatever else differs between runs of one name.

    Args:
        runs: contents of `metrics.json` (of a run that has none, ``label`` and ``config`` are enough).
        beside: what stands beside the names already: ``model``, ``dataset``.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    settings = [{key: value for key, value in _settings(run).items() if key not in beside} for run in runs]
    for run, mine in zip(runs, settings, strict=True):
        alike.setdefault(str(run["label"]), []).append(mine)
    differing = {
        label: {key for each in group for key in each if any(other.get(key) != each[key] for other in group)}
        for label, group in alike.items()
    }
    names = []
    for run, mine in zip(runs, settings, strict=True):
        label = str(run["label"])
        told = [f"{key.rsplit('.', 1)[-1]}={_said(mine[key])}" for key in mine if key in differing[label]]
        names.append(" ".join([label, *told]))
    return names


def notes(runs: Sequence[Metrics]) -> list[str]:
    """What a reader must know beside the numbers."""
    lines = ["± standard error over samples; Δ paired difference to fp16 on the same samples"]
    if any(map(has_points, runs)):
        devices = sorted({run["env"]["device_name"] for run in runs if run["env"].get("device_name")})
        return [*points_table.notes(runs), "device: " + ("; ".join(devices) or "unknown")]
    kinds = {run["peak_bytes"]["kind"] for run in runs} - {None}
    described = {
        "cpu_live_tensors": "live tensors, weights included, counted on the longest prompt",
        "cuda_allocator": "CUDA allocator, weights included",
    }
    for kind in sorted(kinds):
        lines.append(
            f"KV: bytes of a sequence's cache in use; ratio: method=fp16's bytes to them; peak: {described[kind]}"
        )
    batches = sorted({run["config"].get("batch_size") or 1 for run in runs} - {1})
    if batches:
        sizes = " and ".join(map(str, batches))
        lines.append(f"batches of {sizes} prompts: TTFT, TPOT and peak are a whole batch's, KV is one sequence's")
    if any(run["env"].get("dtype") == "float32" for run in runs):
        lines.append("the model runs in float32: method=fp16 holds 4 bytes an element, and ratios are to that")
    modes = sorted({e["perplexity"]["mode"] for run in runs for e in run["scores"].values() if e.get("perplexity")})
    if modes:
        lines.append(f"ppl: perplexity over windows of the model's tokens, mode {', '.join(modes)}; lower is better")
    if any(run.get("speculation") for run in runs):
        lines.append("accepted: drafts accepted of those made, and tokens a round; speed-up: fp16's TPOT to this one")
    lines += [f"{run['label']}: {untouched(run)}" for run in runs if run.get("untouched")]
    if any(run["samples"].get("done") and not run["ttft_s"].get("n", 1) for run in runs):
        lines.append(
            "TTFT, TPOT: - where the only timed sample is the warm-up (a session's first batch, which does not count):"
            " take a larger dataset.limit, or a smaller runtime.batch_size"
        )
    lines += _doubts(runs)
    truncated = {run["samples"]["truncated"] for run in runs} - {0}
    if truncated:
        lines.append(f"{max(truncated)} prompts were longer than the model takes and were cut in the middle")
    devices = sorted({run["env"]["device_name"] for run in runs if run["env"].get("device_name")})
    return [*lines, "device: " + ("; ".join(devices) or "unknown")]


def untouched(run: Metrics) -> str:
    """That a method packed and dropped nothing in a run, and why."""
    found = run["untouched"]
    return (
        f"nothing was packed or dropped: the longest sample had {found['longest']} tokens in the cache, and "
        f"{found['key']}={found['value']} leaves up to {found['exact']} exact"
    )


def _doubts(runs: Sequence[Metrics]) -> list[str]:
    """What makes figures less than they seem, and of which runs."""
    made: dict[str, list[str]] = {}
    for run, name in zip(runs, labels(runs), strict=True):
        if len(run.get("code") or ()) > 1:
            made.setdefault("samples by different versions of the code (see report --show)", []).append(name)
        if run.get("older"):
            older = f"{run['older']['samples']} of {run['samples']['done']} samples, {shown(run['older'])}"
            made.setdefault(f"{older}: runtime.rerun=true makes them anew", []).append(name)
        if run.get("baseline_differs"):
            parts = ", ".join(run["baseline_differs"])
            made.setdefault(f"the fp16 run it is compared with was made by other code: {parts}", []).append(name)
        busy = busyness(run["env"].get("load"))
        if busy:
            made.setdefault(busy, []).append(name)
    return [f"{_some(names)}: {doubt}" for doubt, names in made.items()]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def reread(run: Metrics) -> Metrics:
    """`metrics.json` as it is on disk now, where the run says where it lies."""
    if not run.get("run_dir"):
        return run
    try:
        content = json.loads((Path(run["run_dir"]) / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return run
    return run if shape.problem(content) or content["run_id"] != run["run_id"] else content


def _score(entry: Mapping[str, Any] | None) -> Cell:
    if entry and entry.get("perplexity"):
        found = entry["perplexity"]
        pair = found["vs_fp16"]
        detail = f"Δ {pair['diff']:+.4f}{_error(pair['stderr'], 4)}" if pair else ""
        return Cell(f"ppl {found['ppl']:.3f}{_error(found['stderr'])}", detail)
    if not entry or entry.get("score") is None:
        return Cell("-")
    pair = entry.get("vs_fp16")
    detail = f"Δ {pair['diff']:+.3f}{_error(pair['stderr'])}" if pair else ""
    return Cell(f"{entry['score']:.3f}{_error(entry['stderr'])}", detail)


def _error(stderr: float | None, digits: int = 3) -> str:
    return "" if stderr is None else f" ±{f'{stderr:.{digits}f}'.removeprefix('0')}"


def _costs(run: Metrics) -> list[Cell]:
    kv, peak = run["kv_bytes"], run["peak_bytes"]
    ratio = "-" if kv["ratio"] is None else f"{kv['ratio']:.2f}x"
    phases = [value for value in (peak["prefill"], peak["decode"]) if value is not None]
    rest = run["tpot_s"]
    return [
        Cell(size(kv["used"]["total"])),
        Cell(ratio),
        Cell(size(max(phases)), f"dec {size(peak['decode'])}")
        if phases
        else Cell(size(peak["rss"]), "RSS" if peak["rss"] else ""),
        Cell(seconds(run["ttft_s"]["median"])),
        Cell(seconds(rest["median"]), f"p99 {seconds(rest['p99'])}" if rest["p99"] is not None else ""),
    ]


def _drafts(run: Metrics) -> list[Cell]:
    found = run.get("speculation")
    if not found or found["acceptance_rate"] is None:
        return [Cell("-"), Cell("-")]
    times = "-" if found["speedup"] is None else f"{found['speedup']:.2f}x"
    accepted = f"{found['acceptance_rate']:.3f}{_error(found['stderr'])}"
    return [Cell(accepted, f"{found['tokens_per_round']:.2f} a round"), Cell(times)]


def _status(run: Metrics) -> str:
    if run["status"] == "older":
        return shown(run.get("older"))
    if run["status"] == "oom" and run["oom"] and run["oom"]["bytes_asked"]:
        return f"oom: {size(run['oom']['bytes_asked'])} more"
    return str(run["status"])


def _said(value: Any) -> str:
    """A setting as it is typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(_said, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _settings(run: Metrics) -> dict[str, Any]:
    config = run["config"]
    flat = {key: config.get(key) for key in ("model", "dataset", "seed")}
    for side, form in (config.get("formats") or {}).items():
        flat |= {f"quantizer.{side}_{key}": value for key, value in form.items()}
    flat |= {f"method.{key}": value for key, value in config["method"].items() if key not in UNSAID}
    return flat | {f"decoding.{key}": value for key, value in config["decoding"].items()}


def _tasks(runs: Sequence[Metrics]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run["scores"]))


def _drawn(cell: Cell) -> Text:
    text = Text(cell.main)
    if cell.detail:
        text.append(f"\n{cell.detail}", style="dim")
    return text


def _widths(header: Sequence[str], body: Sequence[Sequence[Cell]]) -> list[int]:
    widths = [max([len(name), *(line[index].width for line in body)]) for index, name in enumerate(header)]
    return [min(widths[0], _LABEL), *widths[1:]]  # longer names take a second line


def _needed(header: Sequence[str], body: Sequence[Sequence[Cell]], gap: int) -> int:
    return sum(_widths(header, body)) + gap * (len(header) - 1)


def _transposed(header: Sequence[str], body: Sequence[Sequence[Cell]]) -> tuple[list[str], list[list[Cell]]]:
    names = [" ".join(filter(None, (line[0].main, line[0].detail))) for line in body]
    lines = [[Cell(header[index]), *(line[index] for line in body)] for index in range(1, len(header))]
    return ["", *names], lines
