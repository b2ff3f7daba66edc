"""``python -m kvbench.report --by-turn``: scores of conversations by the number of the turn, with runs side by side."""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results.labels import labels
from kvbench.results.store import RunStore
from kvbench.util.table import Cell, Grid, fit, printable, render_text

_TURN = re.compile(r"turn(\d+)")
#: mean score of a turn and its standard error, None for a single sample
Score = tuple[float, float | None]


def add_turn_option(what: Any) -> None:
    """Add ``--by-turn`` to the exclusive group `what` of a parser."""
    what.add_argument(
        "--by-turn",
        metavar="RUN",
        nargs="+",
        help="show the scores of conversations (dataset=mini/turns) by turn, with runs side by side; ± is the standard "
        "error",
    )


def show_turns(arguments: argparse.Namespace, chosen: Sequence[RunStore]) -> int:
    """Print the tables of ``--by-turn`` for the runs `chosen`, one per task; return the exit status.

    Raises:
        KvbenchError: a run has not finished, or has no turns.
    """
    runs = [(store.run_id, store.metrics()) for store in chosen]
    for name, metrics in runs:
        if metrics is None or not any(turn_scores(entry) for entry in metrics["scores"].values()):
            problem = "has not finished" if metrics is None else "has no turns"
            raise KvbenchError(f"run {name}: it {problem}.\n  hint: run dataset=mini/turns, or use --show")
    whole = [metrics for _, metrics in runs if metrics is not None]
    shown = labels(whole, beside=("model", "dataset.turns", "dataset.history"))
    names = [", ".join(filter(None, (name, kind_of(run)))) for name, run in zip(shown, whole, strict=True)]
    tables = turn_tables(whole)
    if arguments.format == "csv":
        print(turns_csv(names, tables), end="")
        return 0
    head = ["turn", *names]
    for task, by_turn in tables.items():
        body = [[str(turn), *map(_cell, scores)] for turn, scores in by_turn.items()]
        if arguments.format == "markdown":
            rule = ["--:"] * len(head)
            print(f"{task}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body)))
        else:
            print(printable(task))
            print(render_text(Grid(head, [[Cell(text) for text in line] for line in body], wraps=()).fitted(fit())))
    return 0


def kind_of(run: Mapping[str, Any]) -> str:
    """Return how the turns of a run see earlier ones: ``stored`` or ``anew``, and ``own`` for the model's answers."""
    identity = (run.get("data") or {}).get("identity") or {}
    return " ".join(str(identity[key]) for key in ("turns", "history") if key in identity)


def turn_scores(entry: Mapping[str, Any]) -> dict[int, Score]:
    """Return mean score and standard error by turn, from 1, of an entry of a run's scores; empty without turns."""
    turns = ((_TURN.fullmatch(name), variant) for name, variant in entry["variants"].items())
    return {int(match[1]): (one["score"], one["stderr"]) for match, one in turns if match and one["score"] is not None}


def turn_tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[Score | None]]]:
    """Return, by the key of the score and by turn, the score of each run; None where a run has no such turn."""
    tables = {}
    for key in dict.fromkeys(key for run in runs for key in run["scores"]):
        columns = [turn_scores(run["scores"][key]) if key in run["scores"] else {} for run in runs]
        turns = sorted({turn for column in columns for turn in column})
        if turns:
            tables[key] = {turn: [column.get(turn) for column in columns] for turn in turns}
    return tables


def turns_csv(names: Sequence[str], tables: Mapping[str, Mapping[int, Sequence[Score | None]]]) -> str:
    """Return the tables of :func:`turn_tables` as CSV with one line per task, turn and run."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["task", "turn", "run", "score", "stderr"])
    for task, by_turn in tables.items():
        for turn, scores in by_turn.items():
            lines.writerows([task, turn, name, *score] for name, score in zip(names, scores, strict=True) if score)
    return text.getvalue()


def _cell(score: Score | None) -> str:
    if score is None:
        return "-"
    return f"{score[0]:.3f}" + ("" if score[1] is None else f" ± {score[1]:.3f}")
