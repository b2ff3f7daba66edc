"""The interface of strategies, one for each kind of work, and the parts of a row that are the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbench.results.samples import Row, sealed
from kvbench.tasks.base import Sample

#: called while a long batch runs, with the number of its samples done so far (a fraction) and a line to show
Report = Callable[[float, str], None]


class Strategy(Protocol):
    """Interface of the classes that run samples; there is one class per kind of work (:mod:`kvbench.tasks.work`).

    In all strategies, `task` scores the answers, `machine` has the names of device and dtypes that are copied into each
    row, and `options` are the kernels and back ends that caches use.
    """

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Run a batch and return one row per sample.

        Args:
            samples: samples with the same kind of work, `max_new_tokens`, `stop`, `end_text` and `say_something`.
            first: True for the first batch of the session, which is a warm-up: its rows are marked, and their times are
                left out of all results. On a CPU, the peak memory of this batch is measured by counting live tensors,
                which slows it down.
            report: function called with the progress of a long batch; None for no reports.

        Raises:
            CacheError: the model did not use the cache of the method.
            DataError: a prompt is too long and the task does not allow truncation.
            torch.OutOfMemoryError: memory ran out.
        """
        ...


@dataclass(frozen=True)
class Machine:
    """Names of a run's device and of its model's dtypes, which are copied into each row.

    Args:
        dtype: dtype of what the cache stores in full precision.
        arithmetic: dtype of weights and activations; None for `dtype`.
        usual_dtype: storage of ``model.dtype=auto``; None for `dtype`.
        slower: why the model computes in 16 bits although float32 would be faster; empty if float32 is not faster.
    """

    device: str
    dtype: str
    arithmetic: str | None = None
    usual_dtype: str | None = None
    slower: str = ""

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes as rows and ``env.json`` record them."""
        named = {
            "dtype": self.dtype,
            "arithmetic": self.arithmetic or self.dtype,
            "usual_dtype": self.usual_dtype or self.dtype,
        }
        return named | ({"slower": self.slower} if self.slower else {})

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
        """Return what a row holds under the key ``measured``: figures that vary between repetitions and machines.

        Args:
            peak_bytes: peak memory by phase; None if it was not measured.
            attention: attention path, and whether it reads packed codes; None if nothing ran.
            warm_up: True for a warm-up batch, whose times are left out of all results.
            ttft_s: time to the first token in seconds; None if unknown.
            step_s: time of each decode step in seconds.
            more: further figures by name, which are added unchanged.
        """
        return {
            "device": self.device,
            **{key: name for key, name in self.dtypes().items() if key != "usual_dtype"},
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
    thinking: bool = False,
    prediction: str = "",
    tokens: Sequence[int] = (),
) -> Row:
    """Return the entries with which every row begins: they identify the sample and hold the generated answer.

    The answer to a private sample is sealed (:func:`kvbench.results.samples.sealed`).

    Args:
        finish: why the answer ended: ``eos``, ``stop`` or ``length``. ``window`` if the likelihood of a text was
            measured instead, and ``oom`` if a measurement of time and memory ran out of memory.
        truncated: number of tokens that truncation removed from the prompt.
        thinking: True if the prompt ends with the tag that begins the answer's thinking.
    """
    return {
        "id": sample.id,
        "task": sample.task,
        "length": sample.length,
        **({} if sample.problem is None else {"problem": sample.problem}),
        "prompt_tokens": prompt_tokens,
        "truncated": truncated,
        **({"thinking": True} if thinking else {}),
        "prediction": sealed(prediction) if sample.private else prediction,
        "tokens": list(tokens),
        "finish": finish,
    }


def row_bill(cache: Any, row: int, rows: int) -> dict[str, Any]:
    """Return ``cache.bill(row)``, the bytes of the cache that belong to one of `rows` rows of a batch, as a dict.

    ``used`` holds the bytes of this row's tokens, and ``reserved`` an equal share of the bytes of all buffers; both are
    divided by part of the cache (codes, scales, ...).
    """
    bill = cache.bill(row).as_dict()
    return {**bill, "reserved": {part: count // rows for part, count in bill["reserved"].items()}}
