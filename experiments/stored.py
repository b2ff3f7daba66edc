"""Files of results, read and written: JSON, CSV, and tables in Markdown. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
#: rules below the headings of a table in Markdown
RULES = {"l": ":--", "r": "--:", "-": "---"}


def content(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise DataError(
            f"{path} is damaged: {error}.\n  hint: restore it (git checkout), or delete it and make it again"
        ) from None


@cache
def load_result_json(path: str) -> Any:
    """Return the content of a JSON file, named from the repository's root."""
    return content(ROOT / path)


def benchmark_rows(path: str) -> list[Row]:
    """Return the measurements in a benchmark's file, named from the repository's root."""
    measured: list[Row] = load_result_json(path)["rows"]
    return measured


@cache
def csv_rows(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, named from the repository's root."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def some(among: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in among if all(row.get(key) == value for key, value in wanted.items())]


def one(among: Iterable[Row], **wanted: Any) -> Row:
    """Return the only row with these values.

    Raises:
        LookupError: there is none, or more than one.
    """
    chosen = some(among, **wanted)
    if len(chosen) != 1:
        raise LookupError(f"{len(chosen)} rows have {wanted}")
    return chosen[0]


def as_json(content: Any) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=1) + "\n"


def as_csv(head: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, head, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]], align: str = "lr") -> list[str]:
    """Return the lines of a table in Markdown.

    Args:
        head: headings.
        lines: cells of each line.
        align: for each column ``l`` (left), ``r`` (right) or ``-`` (as it comes); the last one is that of the others.
    """
    top, *rest = ("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (head, *lines))
    sides = [RULES[side] for side in align.ljust(len(head), align[-1])]
    return [top, f"|{'|'.join(sides)}|", *rest]


def grid(head: str | Sequence[str], lines: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Return the same as a text; `head` may be the first line, such as ``| setting | ms |``."""
    cells = [cell.strip() for cell in head.split("|")[1:-1]] if isinstance(head, str) else head
    return "\n".join(markdown_table(cells, lines, align)) + "\n"
