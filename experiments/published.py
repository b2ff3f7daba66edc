"""The papers' numbers, from ``results/published/*.csv``: one line per cell, with its keys and its value."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kvbench.errors import DataError

FOLDER = Path(__file__).resolve().parents[1] / "results" / "published"


@cache
def published_lines(name: str, folder: Path = FOLDER) -> tuple[Mapping[str, str], ...]:
    """Return the lines of a CSV as mappings from column to text.

    Raises:
        DataError: there is no such file.
    """
    path = folder / f"{name}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            return tuple(csv.DictReader(handle))
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist.\n  hint: restore {folder} (git checkout), or correct the item's `published`"
        ) from None


@cache
def _index(name: str, columns: tuple[str, ...], folder: Path) -> Mapping[tuple[str, ...], list[Mapping[str, str]]]:
    """Return the lines of a CSV by their values in `columns`."""
    by_key: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for line in published_lines(name, folder):
        by_key.setdefault(tuple(line[column] for column in columns), []).append(line)
    return by_key


def lookup(name: str, keys: Mapping[str, str], value: str, folder: Path = FOLDER) -> float | None:
    """Return the number in column `value` of the one line that agrees with `keys`; None if no line does.

    Raises:
        DataError: the file or a column does not exist, or several lines agree.
    """
    table = published_lines(name, folder)
    missing = sorted({*keys, value} - set(table[0] if table else ()))
    if missing:
        raise DataError(
            f"{name}.csv does not have the columns {', '.join(missing)}; it has {', '.join(table[0] if table else ())}"
        )
    columns = tuple(sorted(keys))
    matches = _index(name, columns, folder).get(tuple(keys[column] for column in columns), ())
    if len(matches) > 1:
        wanted = ", ".join(f"{key}={text}" for key, text in keys.items())
        raise DataError(f"{name}.csv has {len(matches)} lines with {wanted}: one was expected")
    try:
        return float(matches[0][value]) if matches else None
    except ValueError:  # the paper prints no number there: empty, or "OOM"
        return None


def claim(paper: str, text: str, folder: Path = FOLDER) -> float:
    """Return the number of a claim in words by its name; a minus sign before the name negates it.

    Raises:
        DataError: the paper states no such claim.
    """
    sign, name = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    number = lookup(f"{paper}_claims", {"claim": name}, "value", folder)
    if number is None:
        raise DataError(f"{paper}_claims.csv does not contain the claim {name!r}")
    return sign * number
