"""Data of the page beside runs: the leaderboard's rows, recipes of formats by layer, and answers of ``kvbench.fit``.

Rows are files of the folder leaderboard/ beside the folder of results. Recipes and answers are JSON files that the
reader names (``--add``), told apart by their key ``kind``; the recipes that kvbench.tune keeps are always there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.page.numbers import short_number, shorten_middle, trimmed, whole_or_empty
from kvbench.results import board
from kvbench.results.board_file import read_row, row_files

#: most rows, recipes and answers of the page, layers of a recipe, formats and notes of an answer, and bytes of a file
MOST_ROWS, MOST_FILES, MOST_LAYERS, MOST_FORMATS, MOST_NOTES, MOST_BYTES = 300, 10, 200, 40, 20, 1 << 20
#: recipes that kvbench.tune keeps, below the folder of results
RECIPES = "tune/**/recipe.json"
_BITS = re.compile(r"\d+")


def shared_rows(folder: Path) -> tuple[list[list[Any]], list[str]]:
    """Return the rows of a leaderboard, and messages about files that are none.

    Each row is ``[name, model, data, group, measure, value, its reach, samples, difference from fp16, its reach, KV
    bytes, fp16's bytes, device, who, link, status, file]``; reaches are 2 standard errors. Bytes are not recomputed
    here: ``python -m kvbench.submit --check`` does that.
    """
    rows, files = list[board.BoardRow](), row_files(folder)
    notes = [f"the leaderboard has {len(files)} rows, of which {MOST_ROWS} are shown"] if files[MOST_ROWS:] else []
    for path in files[:MOST_ROWS]:
        try:
            rows.append(read_row(path))
        except board.RowError as error:
            notes.append(f"not a row of the leaderboard: {error}")
    return [_shared_row(row, rows) for row in rows if row.again is None], notes


def _shared_row(row: board.BoardRow, rows: Sequence[board.BoardRow]) -> list[Any]:
    pair = board.from_exact(row, rows)
    numbers = (
        *(row.mean.value, 2 * row.mean.stderr if row.mean.stderr is not None else None, row.mean.n),
        *((None, None) if pair is None else (pair.value, 2 * pair.stderr if pair.stderr is not None else None)),
        *(row.bytes.total, row.bytes.fp16),
    )
    texts = row.device, row.who, row.link, board.row_status(row, rows), row.file
    names = (row.name, row.model, row.data, row.group, row.measure)
    return [*(shorten_middle(text, 80) for text in names), *map(short_number, numbers),
            *(None if text is None else shorten_middle(text, 200) for text in texts)]  # fmt: skip


def added_files(results: Path, named: Sequence[Path]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return recipes and answers by kind, ``recipe`` and ``fit``, and messages about files that are neither.

    `results` is the folder of results, whose recipes are always shown; `named` are the reader's files, shown first.

    Raises:
        KvbenchError: a named file cannot be shown.
    """
    found: dict[str, list[dict[str, Any]]] = {"recipe": [], "fit": []}
    notes = []
    own = sorted(results.glob(RECIPES))
    for path in dict.fromkeys([*named, *own]):
        try:
            kind, shown = _added(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{path}: is neither a recipe of kvbench.tune nor an answer of kvbench.fit --json"
            if path in named:
                hint = "name another file after --add"
                raise KvbenchError(f"{problem} ({type(error).__name__}).\n  hint: {hint}") from None
            notes.append(problem)
        else:
            found[kind] = [*found[kind], shown][:MOST_FILES]
    return found, notes


def _added(path: Path) -> tuple[str, dict[str, Any]]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError("too large")
    content = json.loads(path.read_text(encoding="utf-8"))
    kind = content["kind"]
    return kind, {"recipe": recipe_data, "fit": fit_data}[kind](content)


def recipe_data(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe for the page: its figures, and by layer ``[keys, values, bits of keys, bits of values]``."""
    loss = content.get("kl") or {}
    layers = [[shorten_middle(layer[side], 40) for side in ("keys", "values")] for layer in content["layers"]]
    if not layers:
        raise ValueError("no layers")
    return {
        **{key: shorten_middle(content.get(key) or "?", 80) for key in ("model", "search")},
        **{key: short_number(content.get(key)) for key in ("budget_bits", "bits", "evaluations")},
        "kl": [short_number(loss.get(key)) for key in ("mean", "se", "p99")],
        "layers": [[*sides, *map(named_bits, sides)] for sides in layers[:MOST_LAYERS]],
    }


def named_bits(form: str) -> int | None:
    """Return the bits in a format's name, such as 4 of ``nvfp4``: the first number in it; None without one."""
    number = _BITS.search(form)
    return int(number[0][:2]) if number else None


def fit_data(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of ``kvbench.fit`` for the page.

    ``rows`` has for each format ``[name, fits, longest context, largest batch, cache bytes, TPOT, its lower end, its
    upper end, KL divergence, flips, engines]``.
    """
    rows = [
        trimmed(
            [
                shorten_middle(row["format"], 40),
                bool(row["fits"]),
                *(short_number(row[key]) for key in ("longest_context", "largest_batch", "cache_bytes")),
                *(short_number(row.get(key)) for key in ("tpot_s", "tpot_low_s", "tpot_high_s", "kl", "flips")),
                [shorten_middle(engine, 20) for engine in row["flags"]],
            ]
        )
        for row in content["rows"][:MOST_FORMATS]
    ]
    best = next((row for row in content["rows"] if row["format"] == content.get("best")), None)
    commands = {} if best is None else best["commands"]
    return {
        "title": shorten_middle(f"{content['model']} on {content['gpu']}, {content['context']} tokens", 120),
        "sentence": shorten_middle(content["sentence"], 400),
        "best": None if best is None else shorten_middle(best["format"], 40),
        "rows": rows,
        "notes": [shorten_middle(note, 400) for note in content["notes"][:MOST_NOTES]],
        "commands": [
            [shorten_middle(engine, 20), whole_or_empty(str(command), 600)]
            for engine, command in commands.items()
            if command
        ],
    }
