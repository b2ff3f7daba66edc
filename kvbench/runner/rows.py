"""Parts of a row that every kind of work has."""

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
        """Return the measured part of a row; `more` stands after the times."""
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
    """Return the part of a row that says which sample it is of, and what came out."""
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
    """Return the bytes of one sequence: those in use are its own, those reserved its part of the batch's buffers."""
    bill = cache.bill(row).as_dict()
    return {**bill, "reserved": {part: count // rows for part, count in bill["reserved"].items()}}
