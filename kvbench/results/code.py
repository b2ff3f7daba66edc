"""Code versions of rows: digests of the code that made a row, by part, and the parts that have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.results.samples import MEASURED, Row

#: part of the code -> digest of its sources; None for a part without source files
Code = dict[str, str | None]

#: stands for the code of rows that do not record digests by part
UNKNOWN = "unknown"
#: the part whose changes need no new predictions: stored predictions are scored again
SCORER = "scorer"
#: the part that matters only on a GPU
KERNELS = "kernels"
#: parts that may differ between a method's run and the fp16 run it is paired with
_OWN = ("method", "quantizer", SCORER, KERNELS)

_DIGITS = 12


def of(row: Row) -> Code | None:
    """Return the digests of the code that made a row; None if the row has none, or has them in an older form."""
    code = row.get(MEASURED, {}).get("code")
    return dict(code) if isinstance(code, Mapping) else None


def used(code: Code, *, on_gpu: bool) -> Code:
    """Return the parts of the code that affect a row: all of them on a GPU, else all except the GPU kernels."""
    return {part: value for part, value in code.items() if on_gpu or part != KERNELS}


def digest(code: Code | None) -> str:
    """Return one digest of all parts but the scorer's; :data:`UNKNOWN` for None."""
    if code is None:
        return UNKNOWN
    text = "\n".join(f"{part} {value}" for part, value in sorted(code.items()) if part != SCORER)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def changed(stored: Code | None, now: Code) -> list[str]:
    """Return the parts of the code that have changed since a row was made; ``["unknown"]`` if it records no code.

    The scorer is left out, and so are parts that the row does not name, because they do not affect it (GPU kernels on a
    CPU). A part without source files (None) cannot be compared and counts as unchanged.
    """
    if stored is None:
        return [UNKNOWN]
    return [
        part
        for part, value in stored.items()
        if part != SCORER and value is not None and now.get(part) is not None and value != now[part]
    ]


def kinds(rows: Iterable[Row]) -> tuple[dict[str, int], dict[str, Code]]:
    """Return, for each version of the code (its :func:`digest`), the number of rows that it made and its parts."""
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
    """Return how many samples of a run other code than `now` made; None if there are none.

    Args:
        counts: number of rows by version of the code (:func:`kinds`).
        parts: digests of the parts of each version (:func:`kinds`).
        now: the code as it is now.

    Returns:
        ``{"samples": their number, "parts": the parts of the code that have changed since}``.
    """
    differing = {name: changed(parts.get(name), now) for name in counts}
    count = sum(counts[name] for name, names in differing.items() if names)
    names = {part for part_names in differing.values() for part in part_names}
    return {"samples": count, "parts": sorted(names, key=order)} if count else None


def order(part: str) -> int:
    """Return a sort key for parts in messages: those that users edit come first."""
    places = ("method", "quantizer", "task")
    return places.index(part) if part in places else len(places) + (part == UNKNOWN)


def unlike(rows: Iterable[Row], others: Mapping[str, Row]) -> list[str]:
    """Return the parts of the code that changed between a method's rows and the fp16 rows they are paired with.

    Only parts that both runs share are compared: not the method, the quantizer, the scorer or the GPU kernels.

    Args:
        rows: the method's rows.
        others: sample id -> row of the fp16 run.
    """
    parts: set[str] = set()
    for row in rows:
        mine, other = of(row), of(others.get(row["id"], {}))
        if mine is not None and other is not None:
            parts |= {part for part in changed(other, mine) if part not in _OWN}
    return sorted(parts)


def shown(parts: Sequence[str]) -> str:
    """Return a mark for tables, for example ``older code: method, cache``; empty if `parts` is.

    Args:
        parts: the parts of the code that have changed since the samples were made (:func:`older`).
    """
    if not parts:
        return ""
    return "unknown code" if list(parts) == [UNKNOWN] else f"older code: {', '.join(parts)}"
