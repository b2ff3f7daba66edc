"""Rows and the code that made them: digests by part, and what of a run is of older code than now's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.results.samples import MEASURED, Row

#: part of the code -> digest of its sources; None where a part has none
Code = dict[str, str | None]

#: rows from before digests were recorded by part
UNKNOWN = "unknown"
#: whose edits need no new predictions: stored ones are scored anew
SCORER = "scorer"
#: matter on a GPU alone
KERNELS = "kernels"
#: parts that differ between a method's run and the fp16 run of the same setting
_OWN = ("method", "quantizer", SCORER, KERNELS)

_DIGITS = 12


def of(row: Row) -> Code | None:
    """Return the code that made a row; None where the row does not say (or says it as rows did before)."""
    code = row.get(MEASURED, {}).get("code")
    return dict(code) if isinstance(code, Mapping) else None


def used(code: Code, *, on_gpu: bool) -> Code:
    """Return the parts that matter to a row: GPU kernels only where it was made on a GPU."""
    return {part: value for part, value in code.items() if on_gpu or part != KERNELS}


def digest(code: Code | None) -> str:
    """Return one digest of all parts but the scorer's; :data:`UNKNOWN` for None."""
    if code is None:
        return UNKNOWN
    text = "\n".join(f"{part} {value}" for part, value in sorted(code.items()) if part != SCORER)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def changed(stored: Code | None, now: Code) -> list[str]:
    """Return the parts of the code that differ now from what made a row; ``["unknown"]`` where nobody knows.

    Parts that the row does not name did not matter to it (GPU kernels on a CPU), and a part without a source (None)
    cannot be compared.
    """
    if stored is None:
        return [UNKNOWN]
    return [
        part
        for part, value in stored.items()
        if part != SCORER and value is not None and now.get(part) is not None and value != now[part]
    ]


def kinds(rows: Iterable[Row]) -> tuple[dict[str, int], dict[str, Code]]:
    """Return how many rows each version of the code made, and the digests of its parts, both by :func:`digest`."""
    counts: dict[str, int] = {}
    parts: dict[str, Code] = {}
    for row in rows:
        code = of(row)
        name = digest(code)
        counts[name] = counts.get(name, 0) + 1
        if code is not None:
            parts[name] = {part: value for part, value in code.items() if part != SCORER}
    return counts, parts


def older(counts: Mapping[str, int], parts: Mapping[str, Code], now: Code) -> dict[str, Any] | None:
    """Return what of a run other code made than `now`; None where nothing was.

    Args:
        counts, parts: of :func:`kinds`.

    Returns:
        ``{"samples": how many, "parts": [those that changed since]}``.
    """
    differing = {name: changed(parts.get(name), now) for name in counts}
    count = sum(counts[name] for name, names in differing.items() if names)
    names = {part for part_names in differing.values() for part in part_names}
    return {"samples": count, "parts": sorted(names, key=order)} if count else None


def order(part: str) -> int:
    """Return the place of a part in messages: what a user edits first."""
    places = ("method", "quantizer", "task")
    return places.index(part) if part in places else len(places) + (part == UNKNOWN)


def unlike(rows: Iterable[Row], others: Mapping[str, Row]) -> list[str]:
    """Return the shared parts in which rows differ from those of the fp16 run that they are paired with."""
    parts: set[str] = set()
    for row in rows:
        mine, other = of(row), of(others.get(row["id"], {}))
        if mine is not None and other is not None:
            parts |= {part for part in changed(other, mine) if part not in _OWN}
    return sorted(parts)


def shown(parts: Sequence[str]) -> str:
    """Return a mark for tables: ``older code: method, cache``; empty for no parts.

    Args:
        parts: of the code, that have changed since the samples were made (:func:`older`).
    """
    if not parts:
        return ""
    return "unknown code" if list(parts) == [UNKNOWN] else f"older code: {', '.join(parts)}"
