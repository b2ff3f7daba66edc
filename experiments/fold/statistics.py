"""Tables of data sets: counts and lengths of the records that kvbench asks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments import published
from experiments.data import data_overrides
from experiments.fold.cells import Cell, Folded, Heading, interval_fields
from experiments.fold.figures import standard_error
from experiments.item import MINI, Computed, Described, Model
from experiments.plan import Plan
from experiments.runs import composed, run_of
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import KvbenchError
from kvbench.runner.origins import of
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
    cells: list[Cell] = []
    sources: dict[str, None] = {}
    for row in rows:
        own, commits = _cells(item, row, plan)
        cells += own
        sources |= dict.fromkeys(commits)
    return Folded(
        headings=[Heading(name=COUNT, digits=0), Heading(name=LENGTH, unit="words", digits=0)],
        rows=[row.name for row in rows],
        models=[""],
        cells=cells,
        notes=[
            "Length: LongBench's own count (words, or characters in Chinese); elsewhere words of the prompt.",
            *([f"Records of {'; '.join(sources)}."] if sources else []),
        ],
        marks=["format only: generated records, no result"] if plan.data == "standin" else [],
    )


def _cells(item: Computed, row: Described, plan: Plan) -> tuple[list[Cell], list[str]]:
    """Return the cells of a data set, and ``OWNER/NAME at commit HASH`` of its files that came from the hub."""
    place = {"model": "", "row": row.name}
    printed = {
        COUNT: _printed(item, row, "records", plan),
        LENGTH: _printed(item, row, "avg_len", plan),
    }
    try:
        config = _config(row, plan)
        samples = [sample for sample in config.task.samples() if row.data.task in ("", sample.task)]
        lengths = [float(_length(sample)) for sample in samples]
    except KvbenchError as problem:
        reason = str(problem)
        return [Cell(**place, column=name, paper=number, reason=reason) for name, number in printed.items()], []
    count = Cell(**place, column=COUNT, paper=printed[COUNT], ours=float(len(lengths)), n=len(lengths))
    mean = Cell(
        **place,
        column=LENGTH,
        paper=printed[LENGTH],
        ours=fmean(lengths),
        stderr=standard_error(lengths),
        n=len(lengths),
        **interval_fields(fmean(lengths), standard_error(lengths), len(lengths)),
    )
    commits = [f"{entry['hub_id']} at commit {entry['revision']}" for entry in of(config).get("data", ())]
    return [count, mean], commits


def _printed(item: Computed, row: Described, value: str, plan: Plan) -> float | None:
    if not item.published or not row.data.published or plan.data != "paper":
        return None
    return published.lookup(item.published, row.data.published, value)


def _config(row: Described, plan: Plan) -> RunConfig:
    """Return the configuration of a run over a data set, of one task where the column names one."""
    data = data_overrides(row.data, plan, Model("tiny"))
    return checked_config(composed(run_of("fp16", "tiny", data, plan).overrides))


def _length(sample: Sample) -> int:
    """Return a sample's length: that of LongBench's record, else the words of the prompt."""
    return int(sample.meta.get("words") or len(sample.prompt.split()))
