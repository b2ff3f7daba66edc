"""The samples on which two runs differ, with both predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.page.numbers import cut, short
from kvbench.page.runs import Entry
from kvbench.results.compare import compare, reach
from kvbench.results.samples import Row

#: maximum number of samples per pair, and of characters per prediction
MOST, LONGEST = 200, 4000


def pair(a: Entry, b: Entry) -> dict[str, Any]:
    """Return the samples on which two runs differ, those with different scores first.

    Returns:
        ``runs``, the ids of both; ``tasks``, the paired differences B - A by task; ``samples``, at most :data:`MOST`
        entries ``[id, score of A, score of B, prediction of A, prediction of B]``; ``left_out``, the number of further
        samples; ``equal``, the number of samples with the same prediction; and ``notes``, reasons why the comparison
        may mislead.

    Raises:
        KvbenchError: the samples of a run cannot be read.
    """
    comparison = compare(a.store, b.store)
    rows_a, rows_b = a.store.samples().rows, b.store.samples().rows
    common = [name for name in rows_a if name in rows_b]
    differing = [name for name in common if _output(rows_a[name]) != _output(rows_b[name])]
    differing.sort(key=lambda name: (-_distance(rows_a[name], rows_b[name]), name))
    samples = [
        [
            cut(name, 200),
            *(short(rows[name]["scores"].get("score")) for rows in (rows_a, rows_b)),
            *(cut(rows[name]["prediction"], LONGEST) for rows in (rows_a, rows_b)),
        ]
        for name in differing[:MOST]
    ]
    return {
        "runs": [a.store.run_id, b.store.run_id],
        "tasks": [
            [key, *map(short, (entry["a"], entry["b"], entry["diff"], reach(entry["b"], entry), entry["n"]))]
            for key, entry in comparison.keys.items()
        ],
        "samples": samples,
        "left_out": len(differing) - len(samples),
        "equal": len(common) - len(differing),
        "notes": [cut(note, 300) for note in comparison.notes],
    }


def _output(row: Row) -> tuple[Any, Any]:
    return row["prediction"], row["scores"].get("score")


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    scores = [short(row["scores"].get("score")) or 0.0 for row in (a, b)]
    return abs(scores[1] - scores[0])
