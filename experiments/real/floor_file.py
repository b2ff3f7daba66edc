"""The floors of a model's data sets, read from the file that ``python -m experiments.real floors`` writes.

They are of one model, which the file names with a digest of its weights, and judge no other model's claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.data import choice_data
from experiments.item import Column
from experiments.measured import slug_of
from experiments.real.files import MODEL, digest_of
from kvbench.errors import DataError
from kvbench.util.fingerprint import fingerprint

#: where the files are, by model (:func:`floor_path`)
ROOT = stored.ROOT / "results"
FILE = "floors.json"
#: verdicts on a data set; of the last nothing is known
ABOVE, AT, UNKNOWN = "above", "at the floor", "too few rows"
#: what the file has of each data set
FIGURES = ("fp16", "empty", "random", "gap")


def set_name(column: Column) -> str:
    """Return the name of a column's data set, with its task, in the table of floors."""
    return f"{column.data}/{column.task}" if column.task else column.data


def floor_path(model: str) -> Path:
    """Return the file with the floors of a model."""
    return ROOT / ("smollm2" if model == MODEL else f"{slug_of(model)}/real") / "floors" / FILE


def model_digest(model: str) -> str | None:
    """Return a digest of a model's weights: of its package's file, its commit on the hub, or its local files.

    None where nothing pins them.
    """
    preset = choice_data("model", model)
    if preset:
        pinned = (preset.get("package") or {}).get("sha256") or preset.get("revision")
        return None if pinned is None else str(pinned)
    place = Path(model).expanduser()
    return digest_of(place) if place.is_file() else fingerprint(place)


def read_floors(path: Path) -> dict[str, Any]:
    """Return the content of a file of floors.

    Raises:
        DataError: it is damaged, or another file.
    """
    whole = stored.content(path)
    lines = whole.get("lines") if isinstance(whole, dict) and isinstance(whole.get("model"), str) else None
    if not isinstance(lines, list) or not all(map(_is_floor, lines)):
        hint = "restore it (git checkout), or delete it and run python -m experiments.real floors --write"
        raise DataError(f"{path} is damaged: not the floors of a model's data sets.\n  hint: {hint}")
    return dict(whole)


def _is_floor(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("name"), str) or not isinstance(line.get("n"), int):
        return False
    parts = FIGURES if line["n"] else ("reason",)
    return line.get("verdict") in (ABOVE, AT, UNKNOWN) and line.keys() >= set(parts)


def verdicts_of(model: str) -> Mapping[str, str] | None:
    """Return the verdict on each data set for a model; None where its floors are not known.

    A file of another model, or of other weights of this name, says nothing.

    Raises:
        DataError: the model's file is damaged.
    """
    path = floor_path(model)
    whole = read_floors(path) if path.exists() else {}
    if not whole or (whole["model"], whole.get("digest")) != (model, model_digest(model)):
        return None
    return {line["name"]: line["verdict"] for line in whole["lines"]}
