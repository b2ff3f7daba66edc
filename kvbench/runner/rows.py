"""The parts of a row that are the same for every kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.results.samples import Row
from kvbench.tasks.base import Sample


@dataclass(frozen=True)
class Machine:
    """Device and dtype of a run, as its rows name them."""

    device: str
    dtype: str

    def measured(
        self,
        batch_rows: int,
        peak_bytes: Mapping[str, Any] | None,
        attention: Mapping[str, Any] | None,
        *,
        warm_up: bool = False,
        ttft_s: float | None = None,
        step_s: Sequence[float] = (),
        **more: Any,
    ) -> dict[str, Any]:
        """Return the measured part of a row.

        Args:
            batch_rows: number of rows in the batch.
            peak_bytes: peak memory by phase; None if it was not measured.
            attention: attention path, and whether it reads packed codes; None if nothing ran.
            warm_up: whether the times count as warm-up.
            ttft_s: time to the first token in seconds; None if unknown.
            step_s: seconds of each decode step.
            more: further figures, placed after the times.
        """
        return {
            "device": self.device,
            "dtype": self.dtype,
            "warm_up": warm_up,
            "batch_rows": batch_rows,
            "ttft_s": ttft_s,
            "step_s": list(step_s),
            **more,
            "peak_bytes": peak_bytes,
            "attention": attention,
        }


def head(
    sample: Sample,
    prompt_tokens: int,
    finish: str,
    *,
    truncated: int = 0,
    prediction: str = "",
    tokens: Sequence[int] = (),
) -> Row:
    """Return the first part of a row: the sample's identification and the generated answer."""
    return {
        "id": sample.id,
        "task": sample.task,
        "length": sample.length,
        "prompt_tokens": prompt_tokens,
        "truncated": truncated,
        "prediction": prediction,
        "tokens": list(tokens),
        "finish": finish,
    }


def row_bill(cache: Any, row: int, rows: int) -> dict[str, Any]:
    """Return the bytes of one of a batch's `rows` sequences: those that it uses, and an equal share of the reserved."""
    bill = cache.bill(row).as_dict()
    return {**bill, "reserved": {part: count // rows for part, count in bill["reserved"].items()}}
