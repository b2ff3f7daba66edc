"""Repetition of stored samples (``runtime.rerun=times`` or ``all``), continued by the same command if interrupted.

A repetition has a token, which is recorded in the run's folder and in each row that it has made. Under ``times`` a
repeated row keeps its answer, scores and bytes, and gets new times and memory peaks.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results import code as codes
from kvbench.results.samples import MEASURED, Row
from kvbench.results.store import RunStore
from kvbench.results.sweeps import TOKEN
from kvbench.runner import stored

#: keys of what a row measured: the token of the repetition that made it; True if it gave another answer than the stored
MARK, DIFFERS = "rerun", "other_answer"
#: relative difference from which the likelihood of a text counts as another one
CLOSE = 1e-3
#: difference that does not count: the divergence of an exact cache is 0 but for rounding
NOISE = 1e-6


class Rerun:
    """One repetition of a run's stored rows.

    It continues the repetition recorded in the run's folder if that has the same mode and has not ended. In a sweep,
    all jobs share the sweep's token, so a job that has ended is not repeated when the sweep is continued.

    Args:
        store: the run's directory, locked by the caller.
        mode: ``times`` or ``all``.
        anew: True if whole rows are replaced: under ``all``, and for data sets whose rows hold only times.

    Attributes:
        token: text that marks the rows of this repetition.
        ended: True if it has ended before, so that nothing is left to repeat.
    """

    def __init__(self, store: RunStore, mode: str, *, anew: bool) -> None:
        self._store, self._mode, self._anew = store, mode, anew
        noted = store.rerun()
        same = noted.get("mode") == mode
        sweep = os.environ.get(TOKEN)
        unfinished = noted.get("token") if same and not noted.get("ended") else None
        self.token = str(sweep or unfinished or uuid.uuid4().hex)
        self.ended = same and noted.get("token") == self.token and bool(noted.get("ended"))
        self._note()

    def _note(self) -> None:
        self._store.write_rerun({"mode": self._mode, "token": self.token, "ended": self.ended})

    def end(self) -> None:
        """Record that all samples have been repeated."""
        self.ended = True
        self._note()

    def split(self, rows: Mapping[str, Row], now: codes.Code, label: str) -> tuple[dict[str, Row], set[str]]:
        """Return the rows to keep, and the ids of those among them whose samples are to run again.

        `now` holds the digests of the current code (:mod:`kvbench.runner.sources`).

        Raises:
            KvbenchError: only times are to be replaced, but older code made some answers, which new times would not
                fit.
        """
        current, older = stored.split_by_code(rows, now)
        mine = {name: row for name, row in current.items() if row.get(MEASURED, {}).get(MARK) == self.token}
        if self._anew:
            return (dict(current) if self.ended else mine), set()
        if older:
            raise KvbenchError(
                f"{label}: runtime.rerun=times: {len(older)} of {len(rows)} stored samples were made by older code, so "
                "new times would not be those of their answers.\n"
                "  hint: set runtime.rerun=true to repeat these samples whole, or runtime.rerun=all to repeat all"
            )
        return dict(rows), set() if self.ended else set(rows) - set(mine)

    def row(self, before: Row | None, row: Row) -> Row:
        """Return the row to store for a sample that has run; `before` is the stored one, None if there was none."""
        row = {**row, MEASURED: {**row[MEASURED], MARK: self.token}}
        if before is None or self._anew:
            return row
        other = {} if _same_answer(before, row) else {DIFFERS: True}
        return {**before, MEASURED: {**row[MEASURED], **other}}

    def differing(self, rows: Sequence[Row]) -> list[str]:
        """Return the ids of the rows whose repetition gave another answer than the stored one."""
        return [row["id"] for row in rows if row[MEASURED].get(MARK) == self.token and row[MEASURED].get(DIFFERS)]


def _same_answer(before: Row, row: Row) -> bool:
    """Return True if two rows of a sample have the same answer, or, if they have none, nearly the same figures."""
    if any(one.get(key) for one in (before, row) for key in ("tokens", "prediction")):
        return all(before.get(key) == row.get(key) for key in ("tokens", "prediction"))
    numbers = [_numbers(one.get("scores")) | _numbers(one.get("nll")) | _row_divergence(one) for one in (before, row)]
    return all(
        math.isclose(value, numbers[1].get(key, math.nan), rel_tol=CLOSE, abs_tol=NOISE)
        for key, value in numbers[0].items()
    )


def _numbers(values: Any) -> dict[str, float]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {key: value for key, value in pairs if isinstance(value, (int, float))}


def _row_divergence(row: Row) -> dict[str, float]:
    values = (row.get("fidelity") or {}).get("kld")
    return {"kld": sum(values) / len(values)} if values else {}
