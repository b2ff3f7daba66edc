"""Versions of the code that produced rows: a digest for each part of the code, and the parts that have changed.

The parts are, for example, the method, the quantizer, the task, the scorer and the cache (`kvbench.runner.sources`).
"""

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
    """Return the digests of the code that produced a row; None if the row does not record them by part."""
    code = row.get(MEASURED, {}).get("code")
    return dict(code) if isinstance(code, Mapping) else None


def used(code: Code, *, on_gpu: bool) -> Code:
    """Return the digests of the parts of the code that can affect a result on a GPU, or on a CPU.

    Args:
        code: digests of all parts, by name.
        on_gpu: True for results from a GPU; False for results from a CPU, which leaves out the GPU kernels.
    """
    return {part: value for part, value in code.items() if on_gpu or part != KERNELS}


def digest(code: Code | None) -> str:
    """Return one digest that covers all parts of the code except the scorer; :data:`UNKNOWN` if `code` is None."""
    if code is None:
        return UNKNOWN
    text = "\n".join(f"{part} {value}" for part, value in sorted(code.items()) if part != SCORER)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def changed(stored: Code | None, now: Code) -> list[str]:
    """Return the parts of the code that have changed since a row was produced.

    The scorer is not compared. Parts that the row does not record are not compared either, because they did not
    affect it; a row from a CPU, for example, does not record the GPU kernels. A part without source files (None)
    counts as unchanged.

    Args:
        stored: digests that the row records; None if it records none.
        now: digests of the current code.

    Returns:
        Names of the changed parts; ``["unknown"]`` if `stored` is None.
    """
    if stored is None:
        return [UNKNOWN]
    return [
        part
        for part, value in stored.items()
        if part != SCORER and value is not None and now.get(part) is not None and value != now[part]
    ]


def kinds(rows: Iterable[Row]) -> tuple[dict[str, int], dict[str, Code]]:
    """Count the rows of a run by the version of the code that produced them.

    Returns:
        Two dicts, both keyed by the :func:`digest` of a version. The first holds the number of rows of each version.
        The second holds the digests of its parts without the scorer; versions whose rows do not record parts are
        missing there.
    """
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
    """Return how many samples were produced by code that has changed since, and the parts of it that have changed.

    Args:
        counts: number of rows by version of the code (:func:`kinds`).
        parts: digests of the parts of each version (:func:`kinds`).
        now: digests of the current code.

    Returns:
        ``samples``, the number of these samples, and ``parts``, the names of the parts that have changed since; None
        if all samples were produced by the current code.
    """
    differing = {name: changed(parts.get(name), now) for name in counts}
    count = sum(counts[name] for name, names in differing.items() if names)
    names = {part for part_names in differing.values() for part in part_names}
    return {"samples": count, "parts": sorted(names, key=order)} if count else None


def order(part: str) -> int:
    """Return a sort key for the name of a part of the code, so that parts that users often edit come first."""
    places = ("method", "quantizer", "task")
    return places.index(part) if part in places else len(places) + (part == UNKNOWN)


def unlike(rows: Iterable[Row], others: Mapping[str, Row]) -> list[str]:
    """Return the parts of the source code that changed between a method's run and the fp16 run it is compared with.

    Each row records digests of the source code that produced it, one for each part. The result names the parts whose
    digests differ for the same sample. The method, the quantizer, the scorer and the GPU kernels are left out, because
    differences there do not invalidate the comparison of a method with fp16.

    Args:
        rows: the method's rows.
        others: rows of the fp16 run, by sample id.
    """
    parts: set[str] = set()
    for row in rows:
        mine, other = of(row), of(others.get(row["id"], {}))
        if mine is not None and other is not None:
            parts |= {part for part in changed(other, mine) if part not in _OWN}
    return sorted(parts)


def shown(parts: Sequence[str]) -> str:
    """Return the text that marks a run in tables, for example ``older code: method, cache``; empty without parts.

    Args:
        parts: names of the parts of the code that have changed since the samples were produced (:func:`older`).
    """
    if not parts:
        return ""
    return "unknown code" if list(parts) == [UNKNOWN] else f"older code: {', '.join(parts)}"
