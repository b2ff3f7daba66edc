"""Tables of data sets: counts and lengths of the records that kvbench asks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments import published
from experiments.data import data_overrides
from experiments.fold.cells import Cell, Folded, Heading
from experiments.fold.figures import error
from experiments.item import MINI, Computed, Described, Model
from experiments.plan import Plan
from experiments.runs import composed, run_of
from kvbench.errors import KvbenchError
from kvbench.tasks.base import Sample

#: headings, and the column of the published CSV with the number
COUNT, LENGTH = "records", "mean length"


def of_datasets(item: Computed, plan: Plan) -> Folded:
    """Return the number of records and their mean length by data set.

    Args:
        item: ``options`` has ``rows`` (:class:`~experiments.item.Described`); ``published`` of their columns selects
            the CSV's line, which has the columns ``records`` and ``avg_len``.
        plan: the command line's choices; with mini, the bundled tasks are described.
    """
    rows: Sequence[Described] = item.options["rows"]
    if plan.data == "mini":
        rows = [Described(name=f"{column.name} (bundled)", data=column) for column in MINI]
    cells = [cell for row in rows for cell in _cells(item, row, plan)]
    return Folded(
        headings=[Heading(name=COUNT, digits=0), Heading(name=LENGTH, unit="words", digits=0)],
        rows=[row.name for row in rows],
        models=[""],
        cells=cells,
        notes=["Length: LongBench's own count (words, or characters in Chinese); elsewhere words of the prompt."],
        marks=["format only: generated records, no result"] if plan.data == "standin" else [],
    )


def _cells(item: Computed, row: Described, plan: Plan) -> list[Cell]:
    place = {"model": "", "row": row.name}
    printed = {
        COUNT: _printed(item, row, "records", plan),
        LENGTH: _printed(item, row, "avg_len", plan),
    }
    try:
        lengths = [float(_length(sample)) for sample in _samples(row, plan)]
    except KvbenchError as problem:
        reason = str(problem)
        return [Cell(**place, column=name, paper=number, reason=reason) for name, number in printed.items()]
    count = Cell(**place, column=COUNT, paper=printed[COUNT], ours=float(len(lengths)), n=len(lengths))
    mean = Cell(
        **place, column=LENGTH, paper=printed[LENGTH], ours=fmean(lengths), stderr=error(lengths), n=len(lengths)
    )
    return [count, mean]


def _printed(item: Computed, row: Described, value: str, plan: Plan) -> float | None:
    if not item.published or not row.data.published or plan.data != "paper":
        return None
    return published.lookup(item.published, row.data.published, value)


def _samples(row: Described, plan: Plan) -> list[Sample]:
    """Return the samples of a data set, of one task where the column names one."""
    from kvbench.config.run_config import check

    data = data_overrides(row.data, plan, Model("tiny"))
    task = check(composed(run_of("fp16", "tiny", data, plan).overrides)).task
    return [sample for sample in task.samples() if row.data.task in ("", sample.task)]


def _length(sample: Sample) -> int:
    """Return a sample's length: that of LongBench's record, else the words of the prompt."""
    return int(sample.meta.get("words") or len(sample.prompt.split()))
