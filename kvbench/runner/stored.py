"""Stored samples and the code of now: served with a mark, made anew, or refused; never mixed in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbench.config.run_config import RunConfig
from kvbench.errors import KvbenchError
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.results import code as codes
from kvbench.results.code import UNKNOWN, Code
from kvbench.results.samples import Row

#: characters of a digest that messages show
SHOWN = 8

#: parts whose class has a ``version`` that makes another run; of shared code kvbench's developers raise one
_VERSIONED = ("method", "quantizer", "task")


class OlderCodeError(KvbenchError):
    """Samples are missing, and those that are stored were made by other code; nothing was generated."""


def split(rows: Mapping[str, Row], now: Code) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """Return the rows that the code of now made, and of each other row the parts that have changed since."""
    older = {name: changed for name, row in rows.items() if (changed := codes.changed(codes.of(row), now))}
    return {name: row for name, row in rows.items() if name not in older}, older


def check(
    rows: Mapping[str, Row],
    wanted: Sequence[str],
    missing: int,
    now: Code,
    checked: RunConfig,
    *,
    label: str,
    say: Callable[[str], None],
) -> None:
    """Say which of the samples asked for are of older code; refuse to complete them with samples of another.

    Args:
        rows: stored rows by sample id.
        wanted: ids of the samples that the run asks for.
        missing: how many of these are to be generated.
        now: digests of the code, see :mod:`kvbench.runner.sources`.
        checked: the run's configuration; with ``runtime.mix_code`` nothing is refused.
        label: of the run.
        say: takes one message for the user.

    Raises:
        OlderCodeError: samples are missing, and ``runtime.mix_code`` is false.
    """
    stored = {name: rows[name] for name in wanted if name in rows}
    _, older = split(stored, now)
    if not older:
        return
    finding = f"{len(older)} of {len(wanted)} samples {_changes(stored, older, now)}"
    hint = remedies(older, checked)
    if not missing:
        say(f"{label}: warning: {finding}; they are shown as they are\n  hint: {hint}")
    elif checked.runtime.mix_code:
        say(f"{label}: warning: {finding}; the missing {missing} are made by the code of now (runtime.mix_code=true)")
    else:
        raise OlderCodeError(
            f"{label}: {finding}, and {missing} are missing: one run holds the samples of one code.\n"
            f"  hint: {hint}; or runtime.mix_code=true adds the missing {missing}, and the run is marked"
        )


def _changes(stored: Mapping[str, Row], older: Mapping[str, list[str]], now: Code) -> str:
    """Return what is known of the code that made the older samples."""
    parts = sorted({part for names in older.values() for part in names}, key=codes.order)
    if parts == [UNKNOWN]:
        return "do not say which code made them (unknown)"
    changes = []
    for part in parts:
        digests = {str((codes.of(stored[name]) or {}).get(part)) for name, names in older.items() if part in names}
        before = ", ".join(sorted(digest[:SHOWN] for digest in digests))
        changes.append(part if part == UNKNOWN else f"{part} (was {before}, is {str(now.get(part))[:SHOWN]})")
    return f"were made by older code: {', '.join(changes)}"


def remedies(older: Mapping[str, list[str]], checked: RunConfig) -> str:
    """Return what to type: make the samples anew, or raise the version of the part that changed."""
    them = "it" if len(older) == 1 else f"the {len(older)}"
    texts = [f"runtime.rerun=true makes {them} anew"]
    owners = {"method": type(checked.method), "quantizer": QuantizerSpec, "task": type(checked.task)}
    parts = {part for names in older.values() for part in names}
    for part in _VERSIONED:
        if part in parts:
            version = int(getattr(owners[part], "version", 1)) + 1
            texts.append(f"`version = {version}` in class {owners[part].__name__} makes another run and keeps {them}")
    return "; or ".join(texts)
