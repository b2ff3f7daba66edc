"""Tables of data sets: counts and lengths of the records that kvbench asks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments import published
from experiments.data import Plan, data_overrides
from experiments.fold.cells import FORMAT_ONLY, Cell, Folded, Heading, mean_cell
from experiments.fold.figures import standard_error
from experiments.item import MINI, Computed, Described, Model
from experiments.real.files import file_notes
from experiments.runs import composed, run_of
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import KvbenchError
from kvbench.runner.origins import of
from kvbench.tasks.base import Sample

#: headings, and the column of the published CSV with the number
COUNT, LENGTH = "records", "mean length"


def of_datasets(item: Computed, plan: Plan) -> Folded:
    """Return the number of records and their mean length by data set; with mini, of the bundled tasks.

    The item's ``options`` have ``rows`` (:class:`~experiments.item.Described`), whose columns' ``published`` select the
    CSV's line with the columns ``records`` and ``avg_len``.
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
        [Heading(COUNT, digits=0), Heading(LENGTH, "words", 0)],
        [row.name for row in rows],
        [""],
        cells,
        notes=[
            "Length: LongBench's own count (words, or characters in Chinese); elsewhere words of the prompt.",
            *([f"Records of {'; '.join(sources)}."] if sources else []),
            *(file_notes([row.data for row in rows], plan) if plan.data == "real" else []),
        ],
        marks=[FORMAT_ONLY] if plan.data == "standin" else [],
    )


def _cells(item: Computed, row: Described, plan: Plan) -> tuple[list[Cell], list[str]]:
    """Return the cells of a data set, and ``OWNER/NAME at commit HASH`` of its files that came from the hub."""
    printed = {name: _printed(item, row, key, plan) for name, key in ((COUNT, "records"), (LENGTH, "avg_len"))}
    try:
        config = _config(row, plan)
        samples = [sample for sample in config.task.samples() if row.data.task in ("", sample.task)]
        lengths = [float(_length(sample)) for sample in samples]
    except KvbenchError as problem:
        reason = str(problem)
        return [Cell("", row.name, name, number, reason=reason) for name, number in printed.items()], []
    n = len(lengths)
    count = Cell("", row.name, COUNT, printed[COUNT], float(n), n=n)
    mean = mean_cell(("", row.name, LENGTH), fmean(lengths), standard_error(lengths), n, paper=printed[LENGTH])
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
