"""The comparison as tables (markdown) and as a plot of score against bytes (PNG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.measured import markdown_table

#: colours of the families, distinguishable without hue as well (markers differ)
STYLE = {
    "fp16": ("black", "*"),
    "atom": ("tab:brown", "s"),
    "kivi": ("tab:blue", "o"),
    "hf": ("tab:cyan", "P"),
    "logquant": ("tab:green", "^"),
    "cocktail": ("tab:red", "D"),
    "eviction": ("tab:gray", "x"),
    "quantspec": ("tab:purple", "v"),
    "kvquant": ("tab:olive", "h"),
}
Row = Mapping[str, Any]


def mini_markdown(rows: Sequence[Row], pairs: Sequence[Row] = (), missing: Mapping[str, int] | None = None) -> str:
    """Return a line per setting and a column per task, then the pairs, then what the table leaves out."""
    keys = list(rows[0]["tasks"])
    lengths = sorted({key.split("@")[-1] for key in keys}, key=int)
    names = [key.replace("_", " ") if len(lengths) > 1 else key.split("@")[0].replace("_", " ") for key in keys]
    cells = []
    for row in rows:
        whole, used, full = row["mean"], row["kv_bytes"]["used"], row["kv_bytes"]["fp16_equivalent"]
        figures = [
            row["name"],
            f"{100 * whole['score']:.1f} ±{100 * whole['stderr']:.1f}",
            percentage_points(whole["vs_fp16"]) if "vs_fp16" in whole else "-",
            f"{used / 2**20:.2f} MiB",
            f"{full / used:.2f}",
        ]
        cells.append([*figures, *(f"{100 * row['tasks'][key]['score']:.0f}" for key in keys)])
    counts = sorted({row["tasks"][key]["n"] for row in rows for key in keys})
    devices = sorted({device for row in rows for device in row["devices"]})
    versions = sorted({versions_of(row["env"]) for row in rows})
    lines = [
        *markdown_table(["setting", "mean", "Δ to fp16", "KV bytes", "ratio", *names], cells, "-"),
        "",
        f"Scores in percent over the samples that all settings have done: prompts of {', '.join(lengths)} tokens, "
        f"n = {', '.join(map(str, counts))} a task; ± standard error over samples, Δ paired over the same samples. "
        f"KV bytes: in use at the end of a sample, mean. {' and '.join(devices)}; {'; '.join(versions)}.",
    ]
    if missing:
        unfinished = ", ".join(f"{name} ({count} samples)" if count else name for name, count in missing.items())
        lines += ["", f"Not run, or not far enough: {unfinished}."]
    if pairs:
        lines += ["", *in_pairs(pairs)]
    return "\n".join(lines) + "\n"


def in_pairs(pairs: Sequence[Row]) -> list[str]:
    """Return a line per pair: the first less the second in points, over all samples that both have, and by task."""
    keys = sorted({key for pair in pairs for key in pair["tasks"]})
    cells = []
    for pair in pairs:
        whole, cache = pair["mean"], pair["kv_bytes"]
        shown = [
            f"{pair['first']} less {pair['second']}",
            f"{100 * whole['first']:.1f}, {100 * whole['second']:.1f}",
            percentage_points(whole),
            str(whole["n"]),
            percentage_points(pair["by_task"]) if pair["by_task"] else "-",
            f"{cache['first'] / 2**20:.2f}, {cache['second'] / 2**20:.2f}",
        ]
        cells.append(
            [*shown, *(percentage_points(pair["tasks"][key]) if key in pair["tasks"] else "-" for key in keys)]
        )
    head = ["first less second", "scores", "Δ by sample", "n", "Δ by task", "KV bytes, MiB", *keys]
    note = (
        "Differences in points, paired over the samples that both settings have done, ± standard error. By sample: a "
        "task has the weight of its samples, of which some pairs have more in some tasks than in others; by task: all "
        "tasks have the same weight."
    )
    return [*markdown_table(head, cells, "-"), "", note]


def percentage_points(difference: Row) -> str:
    """Return a difference and its standard error in percentage points."""
    return f"{100 * difference['diff']:+.1f} ±{100 * difference['stderr']:.1f}"


def versions_of(env: Row) -> str:
    """Return dtype, device and versions of a run."""
    return f"{env['dtype']}, torch {env['torch']}, transformers {env['transformers']}"


def plot(rows: Sequence[Row], model: str, pyplot: Any, folder: Path) -> None:
    """Plot score against KV bytes, both over all tasks, as ``plot.png``."""
    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for number, row in enumerate(sorted(rows, key=lambda row: -row["kv_bytes"]["used"]), start=1):
        colour, marker = STYLE[row["family"]]
        x, y = row["kv_bytes"]["used"] / 2**20, 100 * row["mean"]["score"]
        spread = 100 * row["mean"]["stderr"]
        label = f"{number}  {row['name']}"
        axes.errorbar(x, y, yerr=spread, color=colour, marker=marker, markersize=7, capsize=2, ls="", label=label)
        # settings of nearly equal bytes: their numbers alternate above and below
        axes.annotate(str(number), (x, y), (5, 7 if number % 2 else -13), textcoords="offset points", color=colour)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("KV bytes in use, MiB (log scale)")
    axes.set_ylabel("score, mean over the tasks, %")
    axes.set_title(f"{model} on mini: accuracy against KV memory")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "plot.png", dpi=130)
    pyplot.close(figure)
