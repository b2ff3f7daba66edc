"""Versions of the code that produced rows: a digest for each part of the code, and the parts that have changed.

The parts are, for example, the method, the quantizer, the task, the scorer and the cache (`kvbench.runner.sources`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.results.samples import MEASURED, Row

#: part of the code -> digest of its sources; None for a part without source files
Code = dict[str, str | None]

#: stands for the code of rows that do not record digests by part
UNKNOWN = "unknown"
#: the part whose changes need no new predictions: stored predictions are scored again
SCORER = "scorer"
#: captured decode steps: a part that rows record only if a GPU replayed some
STEPS = "decoding/steps"
#: parts of rows with figures that only they have: points of time and memory, predictions that are compared with fp16's,
#: and answers to prompts that were read for several methods at once
POINTS, FIDELITY, SHARED = "runner/points", "runner/fidelity", "runner/shared_runs"
#: parts on which answers of a server depend: requests, prompts, tokenizer and scores; the rest runs inside the server
SERVED = "runner/served"
_OF_SERVED = (SERVED, SCORER, "task", "runner", "model", "config", "util")
#: what rows record of the kernels of each package, used on a GPU
_KERNELS = "kernels"
#: dtype of what caches store in full precision, under ``model.dtype=auto``: no code, but rows of another one are older
STORAGE = "storage"
#: parts that may differ between a method's run and the fp16 run it is paired with, as optional ones may
_OWN = ("method", "quantizer", SCORER)

_DIGITS = 12


def of(row: Row) -> Code | None:
    """Return the digests of the code that a row records, by part, with :func:`stored_in`; None if it records none."""
    measured = row.get(MEASURED, {})
    code = measured.get("code")
    return {**code, **stored_in(measured.get("dtype"))} if isinstance(code, Mapping) else None


def stored_in(dtype: str | None) -> Code:
    """Return ``{STORAGE: dtype}`` for a row whose cache stored float32; empty for the 16-bit dtypes in use now."""
    return {STORAGE: dtype} if dtype == "float32" else {}


def storage_now(config: Mapping[str, Any]) -> Code:
    """Return ``{STORAGE: "16 bits"}`` if a configuration has ``model.dtype=auto``; empty if it names a dtype.

    Run ids contain ``model.dtype`` as typed. ``auto`` is a 16-bit dtype on every device, but was float32 on CPUs in
    earlier versions, so rows of both kinds may have the same id.
    """
    return {STORAGE: "16 bits"} if (config.get("model") or {}).get("dtype") == "auto" else {}


def used(code: Code, row: Row | None, *, on_gpu: bool) -> Code:
    """Select the parts of the code that a row has used. Parts without a slash in their names are used by all rows.

    Parts with a slash are selected if they are attention kernels that the row's path names (``attention/cuda``), on a
    GPU the kernels of a package (``cache/kernels``) or captured steps, or the code for figures that the row has.

    Args:
        row: the row; the code that it may record is not read. None selects all that fp16's predictions may use.
    """
    if row is not None and (row.get(MEASURED) or {}).get("endpoint"):
        return {part: value for part, value in code.items() if part in _OF_SERVED}
    return {part: value for part, value in code.items() if not _optional(part) or _used(part, row, on_gpu)}


def _optional(part: str) -> bool:
    """Return True for parts that only some rows use; older versions recorded a single part for all kernels."""
    return "/" in part or part == _KERNELS


def _used(part: str, row: Row | None, on_gpu: bool) -> bool:
    package, _, name = part.partition("/")
    family = package == "attention" and name != _KERNELS
    if row is None:
        return on_gpu or family or part == FIDELITY
    measured = row.get(MEASURED, {})
    point = measured.get("point") or {}
    figures = {POINTS: point, FIDELITY: row.get("fidelity"), SHARED: measured.get("shared_prefill"), SERVED: False}
    if part in figures:
        return bool(figures[part])
    if family:
        path = (measured.get("attention") or {}).get("path") or "none"
        # the path is that of the target's cache alone, and is unknown where nothing was decoded with it
        known = path != "none" and "speculation" not in row and "speculation" not in point
        return not known or re.search(rf"(^|\+){re.escape(name)}\b", path) is not None
    eager = str(measured.get("stepping", point.get("stepping"))).startswith("eager")
    return on_gpu and not (part == STEPS and eager)


def code_digest(code: Code | None) -> str:
    """Hash the digests of all parts of the code into one, which identifies the version of the code that made a row.

    The scorer does not count, because stored predictions are scored again when it changes; nor does the storage dtype.
    The result is :data:`UNKNOWN` for None.
    """
    if code is None:
        return UNKNOWN
    text = "\n".join(f"{part} {value}" for part, value in sorted(code.items()) if part not in (SCORER, STORAGE))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def changed(stored: Code | None, now: Code) -> list[str]:
    """Return the parts of the code that have changed since a row was produced and may have affected the row.

    Only parts that the row records are compared: a row from a CPU, for example, does not record the GPU kernels. The
    scorer never counts. A part without source files (digest None) counts as unchanged. The result is ``["unknown"]`` if
    the row records no code (`stored` is None).
    """
    if stored is None:
        return [UNKNOWN]
    return [
        part
        for part, value in stored.items()
        if part != SCORER and value is not None and now.get(part) is not None and value != now[part]
    ]


def kinds(rows: Iterable[Row]) -> tuple[dict[str, int], dict[str, Code]]:
    """Count how many rows of a run each version of the code produced; a version is named by its :func:`code_digest`.

    Two rows of one version have equal digests for all parts that both record; they may have used different kernels.

    Returns:
        The number of rows of each version, and for each version the digests of its parts (without the scorer). The
        second dict lacks versions whose rows do not record their parts.
    """
    counts: dict[str, int] = {}
    versions: list[tuple[Code, int]] = []
    for row in rows:
        code = of(row)
        if code is None:
            counts[UNKNOWN] = counts.get(UNKNOWN, 0) + 1
            continue
        code.pop(SCORER, None)  # a copy
        place = next((place for place, (known, _) in enumerate(versions) if _agree(known, code)), len(versions))
        known, count = versions[place] if place < len(versions) else ({}, 0)
        versions[place : place + 1] = [({**known, **code}, count + 1)]
    for code, count in versions:
        counts[code_digest(code)] = counts.get(code_digest(code), 0) + count
    return counts, {code_digest(code): code for code, _ in versions}


def _agree(one: Code, other: Code) -> bool:
    """Return True if two rows may be of one version: all parts are equal, except optional ones that one row lacks."""
    return all(
        one.get(part) == other.get(part) or (_optional(part) and not (part in one and part in other))
        for part in one.keys() | other.keys()
    )


def older(counts: Mapping[str, int], parts: Mapping[str, Code], now: Code) -> dict[str, Any] | None:
    """Count the samples of a run that older code produced, and name the parts of the code that have changed since.

    `counts` and `parts` are the results of :func:`kinds`; `now` holds the digests of the current code.

    Returns:
        ``{"samples": number of such samples, "parts": names of the changed parts}``; None if all samples were produced
        by the current code.
    """
    differing = {name: changed(parts.get(name), now) for name in counts}
    count = sum(counts[name] for name, names in differing.items() if names)
    names = {part for part_names in differing.values() for part in part_names}
    return {"samples": count, "parts": sorted(names, key=order)} if count else None


def order(part: str) -> tuple[int, str]:
    """Return a sort key for part names: ``method``, ``quantizer`` and ``task``, which users edit most, come first."""
    places = ("method", "quantizer", "task")
    return (places.index(part) if part in places else len(places) + (part == UNKNOWN)), part


def unlike(rows: Iterable[Row], others: Mapping[str, Row]) -> list[str]:
    """Return the parts of the code that changed between a method's run and the fp16 run it is compared with.

    The parts are those whose recorded digests differ between the two rows of any sample. Such a change may make the
    comparison misleading. The method, the quantizer, the scorer and the GPU kernels may differ and are left out.
    """
    parts: set[str] = set()
    for row in rows:
        mine, other = of(row), of(others.get(row["id"], {}))
        if mine is not None and other is not None:
            parts |= {part for part in changed(other, mine) if part not in _OWN and not _optional(part)}
    return sorted(parts)


def older_code_remark(parts: Sequence[str]) -> str:
    """Describe changed parts of the code as a remark for tables, for example ``older code: method, cache``.

    The remark is ``unknown code`` if the samples do not record their code, and empty if `parts` is empty.
    """
    if not parts:
        return ""
    return "unknown code" if list(parts) == [UNKNOWN] else f"older code: {', '.join(parts)}"
