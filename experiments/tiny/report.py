"""Loss curve and tables of a training, from its log and its scores.

    python -m experiments.tiny.report results/tiny

Reads train_log.jsonl, scores.json and sensitivity.json; writes curve.png, scores.md and sensitivity.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.stored import content, grid


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return scores by task (rows) and length (columns) in per cent, as Markdown."""
    lengths = sorted({int(key.split("@")[1]) for key in scores})
    body = []
    for task in dict.fromkeys(key.split("@")[0] for key in scores):
        cells = [scores[f"{task}@{n}"] for n in lengths]
        body.append([task, *(f"{100 * cell['score']:.1f}" for cell in cells), f"{cells[-1]['nll']:.5f}"])
    return grid(["task", *map(str, lengths), f"nll at {lengths[-1]}"], body, "-")


def sensitivity(result: Mapping[str, Any]) -> str:
    """Return scores by task (rows) and cache format (columns) in per cent, their mean and the difference to fp16."""
    means, tasks = result["mean"], result["tasks"]
    base, *others = means.values()
    body = [[task, *(f"{100 * entries[name]['score']:.0f}" for name in means)] for task, entries in tasks.items()]
    body.append(["**mean**", *(f"{100 * mean['score']:.1f}" for mean in means.values())])
    body.append(["to fp16", "", *(f"{100 * mean['vs_fp16']:+.1f} ± {100 * mean['stderr']:.1f}" for mean in others)])
    body.append(["nll", *(f"{mean['nll']:.4f}" for mean in (base, *others))])
    return grid(["task", *means], body, "-")


def curve(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the losses of answers and text over the tokens seen; the row length changes at the dotted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = [row["tokens"] / 1e6 for row in rows]
    for name in ("text", "answers"):
        axes.plot(tokens, [row[name] for row in rows], label=f"{name} (nats a token)", linewidth=1)
    for before, after in itertools.pairwise(rows):
        if before["length"] != after["length"]:
            axes.axvline(after["tokens"] / 1e6, color="grey", linestyle=":", linewidth=0.8)
            axes.annotate(str(after["length"]), (after["tokens"] / 1e6, 9), fontsize=8)
    axes.set(xlabel="million tokens", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    (folder / "scores.md").write_text(score_table(content(folder / "scores.json")["scores"]))
    (folder / "sensitivity.md").write_text(sensitivity(content(folder / "sensitivity.json")))
    curve([json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()], folder / "curve.png")


if __name__ == "__main__":
    main()
