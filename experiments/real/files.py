"""A folder of benchmark data in the layouts of their authors (``--data-dir``), and what a table says of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from experiments import published
from experiments.data import POINTS, Plan
from experiments.item import Column
from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.tasks import data
from kvbench.util.confdir import group_options
from kvbench.util.fingerprint import sha256

#: name of the variable with the folder that ``--data real`` reads without ``--data-dir``
VARIABLE = "KVBENCH_DATA"
#: choice of ``conf/dataset`` -> places below the folder, of which the first that exists is taken
PLACES: Mapping[str, Sequence[str]] = {
    "gsm8k": ("gsm8k",),
    "gsm8k_logquant": ("gsm8k",),
    "infinitebench_sum": ("infinitebench", "longbook_sum_eng.jsonl"),
    "longbench": ("longbench",),
    "longbench_cocktail": ("longbench",),
    "longbench_en": ("longbench",),
    "longbench_logquant": ("longbench",),
    "multi_lexsum": ("multi_lexsum",),
    "openbookqa": ("openbookqa",),
    "perplexity/c4": ("c4",),
    "perplexity/c4_new": ("c4",),
    "perplexity/pg19": ("pg19",),
    "perplexity/wikitext2": ("wikitext2/test.raw.txt.gz", "wikitext2/test.raw.txt", "wikitext2/wiki.test.raw"),
    "pg19": ("pg19",),
}
#: the trained model of the README
MODEL = "smollm2-135m-q4_1"
#: hexadecimal digits of a digest in a table
DIGITS = 16


def paths_in(folder: Path) -> dict[str, str]:
    """Return ``dataset.path`` of the data sets that a folder holds, by their choice of ``conf/dataset``.

    Raises:
        ConfigError: the folder is missing, or holds none of them.
    """
    if not folder.is_dir():
        hint = f"name another folder, or leave {VARIABLE} unset: data then come from the hub"
        raise ConfigError("--data-dir", folder, "is not a folder", hint=hint)
    found = {}
    for choice in group_options("dataset"):
        places = PLACES.get(choice) or (PLACES["longbench"] if choice.startswith("longbench/") else ())
        there = next((folder / place for place in places if (folder / place).exists()), None)
        if there is not None:
            found[choice] = str(there)
    if not found:
        names = sorted({place.partition("/")[0] for places in PLACES.values() for place in places})
        raise ConfigError("--data-dir", folder, "holds none of the data sets", allowed=names)
    return found


def default_folder() -> Path | None:
    """Return the folder that ``KVBENCH_DATA`` names; None if it is not set, so that data come from the hub."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def file_notes(columns: Iterable[Column], plan: Plan) -> list[str]:
    """Return a note on the local files of some columns: their names, digests and numbers of rows; none without any.

    A file with fewer rows than its data set has is called a sample.
    """
    wanted: dict[tuple[str, str], None] = {}
    for column in columns:
        choice = column.over or column.data
        if choice != POINTS and choice in dict(plan.paths):
            wanted[choice, column.task] = None
    parts: list[str] = []
    for choice, task in wanted:
        try:
            parts += _described(choice, task, Path(dict(plan.paths)[choice]))
        except KvbenchError as problem:
            parts.append(f"{task or choice}: {str(problem).splitlines()[0]}")
    return [f"Files: {'; '.join(dict.fromkeys(parts))}."] if parts else []


def _described(choice: str, task: str, place: Path) -> list[str]:
    """Return a text about each file of a data set, or of one of its tasks; one about all texts of a folder."""
    if place.is_file():
        return [_of_file(place, task or choice)]
    few_shot = choice.startswith(("gsm8k", "openbookqa"))
    stems = [task] if task else ["test", "train"] if few_shot else ["test"] if choice == "multi_lexsum" else []
    if not stems:
        texts = sorted(place.glob("*.txt*"))
        together = hashlib.sha256("".join(map(digest_of, texts)).encode()).hexdigest()
        return [f"{place.name} ({len(texts)} texts, sha256 of their digests {together[:DIGITS]})"]
    files = [file for stem in stems for ending in data.ENDINGS if (file := place / f"{stem}{ending}").is_file()]
    if not files:
        raise DataError(f"{place} has no file of {task or choice}")
    return [_of_file(file, task or choice) for file in files]


def _of_file(file: Path, name: str) -> str:
    named, digest = f"{file.parent.name}/{file.name}", f"sha256 {digest_of(file)[:DIGITS]}"
    if file.name.removesuffix(".gz").endswith((".txt", ".raw")):
        return f"{named} ({digest})"
    rows, whole = row_count(file), official_rows().get(name.removesuffix("_logquant"), 0)
    sample = rows < whole and "train" not in file.name
    return f"{named} ({f'sample of {rows:,} rows out of {whole:,}' if sample else f'{rows:,} rows'}, {digest})"


@cache
def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return sha256(file)


@cache
def row_count(file: Path) -> int:
    """Return the number of records of a file."""
    return sum(1 for _ in data.placed_records(data.Found(file)))


@cache
def official_rows() -> dict[str, int]:
    """Return the number of records that a data set has when it is whole, by task, as LogQuant's Table 5 prints them."""
    return {line["dataset"]: int(line["records"]) for line in published.published_lines("logquant_table5")}
