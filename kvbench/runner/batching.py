"""Batches of a run: which samples share one, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvbench.errors import DataError, KvbenchError
from kvbench.tasks.base import Sample


def plan(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Divide samples into batches, and return the batches in the order in which to run them.

    The batch with the longest prompt (in characters) runs first, because the first batch is a warm-up, and its peak
    memory is measured in detail. If the task has its own warm-up samples, their batches run first instead. The other
    batches keep the order of the samples.
    """
    planned = list(batches(samples, size))
    warming = [batch for batch in planned if batch[0].warm_up]
    planned = [batch for batch in planned if not batch[0].warm_up]
    if warming or not planned:
        return [*warming, *planned]
    longest = max(range(len(planned)), key=lambda i: max(len(sample.prompt) for sample in planned[i]))
    return [planned[longest], *planned[:longest], *planned[longest + 1 :]]


def batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield batches of at most `size` consecutive samples that can run together.

    The samples of a batch have the same kind of work, the same `max_new_tokens`, `stop`, `end_text` and
    `say_something`, and are either all warm-up samples or none of them is.
    """
    batch: list[Sample] = []
    for sample in samples:
        alike = batch and _batch_properties(sample) == _batch_properties(batch[0])
        if batch and (not alike or len(batch) == size):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _batch_properties(sample: Sample) -> tuple[Any, ...]:
    """Return the properties in which all samples of a batch must agree."""
    ending = sample.max_new_tokens, sample.stop, sample.end_text, sample.say_something
    return (type(sample.work), *ending, sample.warm_up)


def check_ids(samples: Iterable[Sample]) -> None:
    """Raise KvbenchError if two samples have the same id, because results are stored by id."""
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise KvbenchError(
                f"two samples of the data set have the id {sample.id!r}, but ids must be unique.\n"
                "  hint: let the task's samples() give each sample its own id"
            )
        seen.add(sample.id)


def check_any(samples: Sequence[Sample], dataset: Mapping[str, Any]) -> None:
    """Raise DataError if there are no samples; the message shows the configuration of the data set."""
    if samples:
        return
    hint = (
        "dataset.limit=8" if dataset.get("limit") == 0 else "check the data set's files, dataset.path and dataset.limit"
    )
    raise DataError(
        f"data set {dataset.get('name')}: it contains no samples, so there is nothing to run.\n  hint: {hint}"
    )
