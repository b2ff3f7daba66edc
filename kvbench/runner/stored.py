"""Checks of stored rows against the current code, so that one run never mixes outputs of different code unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from kvbench.config.run_config import RunConfig
from kvbench.errors import KvbenchError
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.results import code as codes
from kvbench.results import summary
from kvbench.results.code import UNKNOWN, Code
from kvbench.results.samples import MEASURED, Row
from kvbench.results.store import RunStore

#: number of a digest's characters that messages show
SHOWN = 8

#: parts whose class has a ``version``, which the user can raise to get another run (not so for shared parts)
_VERSIONED = ("method", "quantizer", "task")


class OlderCodeError(KvbenchError):
    """Error for a run that lacks samples and has rows made by older code, because a run must not mix the two."""


def split_by_code(rows: Mapping[str, Row], now: Code) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """Separate stored rows into those that the current code made and those that older code made.

    `now` holds the digests of the current code (:mod:`kvbench.runner.sources`).

    Returns:
        Two dicts by sample id: the rows that the current code made, and for each other row the names of the parts of
        the code that have changed since it was made.
    """
    older = {name: changed for name, row in rows.items() if (changed := codes.changed(codes.of(row), now))}
    return {name: row for name, row in rows.items() if name not in older}, older


def kept_arithmetic(
    rows: Iterable[Row], store: RunStore, config: Mapping[str, Any]
) -> Literal["storage", "float32"] | None:
    """Return the arithmetic dtype that a run with ``runtime.arithmetic=auto`` must use to stay comparable.

    It is taken from the run's own rows, else from the fp16 run with the same model, data and seed, else from another
    run with these. It is None if there are neither rows nor such runs, or if all of them have caches in another dtype
    than this run's.
    """
    records: list[Mapping[str, Any]] = [row[MEASURED] for row in rows if MEASURED in row]
    if not records:
        pair = summary.baseline(store)
        others = [*([] if pair is None else [pair]), *summary.same_setting(store)]
        records = [other.environment() or {} for other in others if other.run_id != store.run_id]
    today = codes.storage_now(config)
    for record in records:
        dtype = record.get("dtype")
        if dtype and not codes.changed(codes.stored_in(dtype), today):
            return "float32" if record.get("arithmetic", dtype) == "float32" else "storage"
    return None


def check_older_rows(
    rows: Mapping[str, Row],
    wanted: Sequence[str],
    missing: int,
    now: Code,
    checked: RunConfig,
    *,
    label: str,
    say: Callable[[str], None],
) -> None:
    """Raise OlderCodeError if older code made some rows of a run and samples are missing; only warn if none are.

    Args:
        wanted: ids of all samples of the run.
        missing: number of these samples that have no stored row.
        now: digests of the current code (:mod:`kvbench.runner.sources`).
        checked: ``runtime.mix_code=true`` turns the error into a warning, unless the storage dtype has changed too.
    """
    stored = {name: rows[name] for name in wanted if name in rows}
    _, older = split_by_code(stored, now)
    if not older:
        return
    finding = f"{len(older)} of {len(wanted)} samples {_changes(stored, older, now)}"
    hint = remedies(older, checked)
    if not missing:
        say(f"{label}: warning: {finding}; the stored results are shown unchanged\n  hint: {hint}")
    elif any(codes.STORAGE in parts for parts in older.values()):
        raise OlderCodeError(
            f"{label}: {finding}, and {missing} samples are missing. A run must not mix samples whose caches store in "
            "different dtypes.\n"
            "  hint: set runtime.rerun=true to repeat the old samples; or set model.dtype=float32 for a run in float32"
        )
    elif checked.runtime.mix_code:
        say(
            f"{label}: warning: {finding}; the {missing} missing samples are made by the current code "
            "(runtime.mix_code=true)"
        )
    else:
        raise OlderCodeError(
            f"{label}: {finding}, and {missing} samples are missing. A run must not mix samples of different code.\n"
            f"  hint: {hint}; or set runtime.mix_code=true to add the {missing} missing samples anyway and mark the run"
        )


def _changes(stored: Mapping[str, Row], older: Mapping[str, list[str]], now: Code) -> str:
    """Return a phrase that says which parts of the code have changed since the older rows were made."""
    parts = sorted({part for names in older.values() for part in names}, key=codes.order)
    if parts == [UNKNOWN]:
        return "do not record which code made them (unknown)"
    changes = []
    for part in parts:
        digests = {str((codes.of(stored[name]) or {}).get(part)) for name, names in older.items() if part in names}
        before = ", ".join(sorted(digest[:SHOWN] for digest in digests))
        changes.append(part if part == UNKNOWN else f"{part} (was {before}, is {str(now.get(part))[:SHOWN]})")
    return f"were made by older code: {', '.join(changes)}"


def remedies(older: Mapping[str, list[str]], checked: RunConfig) -> str:
    """Return the hint for a run with rows made by older code, as :func:`split_by_code` returns them.

    It names two remedies: to run these samples again, or to increase the `version` of a changed class, which starts a
    new run.
    """
    them = "the old sample" if len(older) == 1 else f"the {len(older)} old samples"
    texts = [f"set runtime.rerun=true to repeat {them}"]
    owners = {"method": type(checked.method), "quantizer": QuantizerSpec, "task": type(checked.task)}
    parts = {part for names in older.values() for part in names}
    for part in _VERSIONED:
        if part in parts:
            version = int(getattr(owners[part], "version", 1)) + 1
            texts.append(
                f"set `version = {version}` in class {owners[part].__name__} to start a new run and keep {them}"
            )
    return "; or ".join(texts)
