"""What each cell of time and memory in the papers' tables is: a number, out of memory, missing, or not ours to measure.

Time and memory depend on a model's dimensions and not on its weights, so that most of these cells can be filled with
random weights. Scores, acceptance on data, and speeds that follow from it need trained weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.checks.rules import Block
from experiments.data import POINTS, Plan, scaled
from experiments.fold import forced
from experiments.fold.cells import OUT_OF_MEMORY
from experiments.fold.grid import Source, fold_grid
from experiments.fold.points import FOLDERS, point_source
from experiments.item import Column, Computed, Grid, Item, Model, Row
from experiments.registry import items
from experiments.stored import markdown_table

#: kinds of cells, with their headings
NUMBER, FULL, MISSING = "with a number", "out of memory", "missing"
TRAINED, FORMULA, ABSENT = "need trained weights", "predicted", "not in the paper's table"
KINDS = (ABSENT, TRAINED, FORMULA, NUMBER, FULL, MISSING)
#: the page with the table of counts
PAGE = "results/h200/papers/README.md"
#: the plan of the papers' own models and data
PAPERS = Plan()


@dataclass(frozen=True)
class CellState:
    """A cell of an item.

    Args:
        item, model, row, column: names of its place.
        kind: one of :data:`KINDS`.
    """

    item: str
    model: str
    row: str
    column: str
    kind: str


def timed_items() -> list[Item]:
    """Return the items of the papers that have cells of time or memory of whole models."""
    return [item for item in items().values() if _is_timed(item)]


def _is_timed(item: Item) -> bool:
    if isinstance(item, Grid):
        return any(column.data == POINTS for column in item.columns)
    return isinstance(item, Computed) and item.compute.startswith("forced:")


def cell_states(item: Item) -> list[CellState]:
    """Return what each cell of an item is, in the table's order."""
    if isinstance(item, Computed):
        folded = forced.shares_of_speed(item, PAPERS)
        kinds = [FORMULA if cell.row not in forced.CASES else _kind(cell.ours, cell.reason) for cell in folded.cells]
        cells = folded.cells
    else:
        assert isinstance(item, Grid)
        cells = fold_grid(item, PAPERS, point_sources(item)).cells
        columns = {column.name: column for column in item.columns}
        groups = {group.name: columns[(group.columns or [*columns])[0]] for group in item.groups}
        kinds = []
        for cell in cells:
            column = columns.get(cell.column) or groups[cell.column]
            if column.only and not any(m.preset in column.only for m in item.models if m.title == cell.model):
                kinds.append(ABSENT)
            else:
                kinds.append(_kind(cell.ours, cell.reason) if column.data == POINTS else TRAINED)
    return [CellState(item.id, c.model, c.row, c.column, kind) for c, kind in zip(cells, kinds, strict=True)]


def _kind(number: float | None, reason: str) -> str:
    if number is not None:
        return NUMBER
    return FULL if reason.startswith(OUT_OF_MEMORY) else MISSING


def point_sources(item: Grid) -> dict[tuple[str, str, str], Source]:
    """Return the stored measurement behind each cell of time and memory; without rows where there is none."""
    return {
        (model.title, row.name, column.name): stored_source(model, row, column) or Source({}, reason="not measured")
        for model, row, column in places(item)
    }


def places(item: Grid) -> Iterator[tuple[Model, Row, Column]]:
    """Yield model, row and column of each cell of time and memory that the paper's table has."""
    for model in item.models:
        for column in item.columns:
            if column.data == POINTS and not (column.only and model.preset not in column.only):
                yield from ((model, row, scaled(column, PAPERS, model)) for row in item.rows if row.setting)


def stored_source(model: Model, row: Row, column: Column) -> Source | None:
    """Return the stored measurement of a cell; None if there is none."""
    assert row.setting is not None
    if column.figure in forced.FIGURES:
        source = forced.forced_source(model.preset, forced.case_of(row.setting), column)
        return source if answered(source) else None
    return point_source(model.preset, row.timed or row.setting, column, FOLDERS)


def answered(source: Source) -> bool:
    """Return True if a measurement ended with a number or out of memory, and need not be repeated."""
    return bool(source.rows) or source.reason.startswith(OUT_OF_MEMORY)


def cells_block() -> Block:
    """Return the table of counts as it stands in the page of the points."""
    lines = markdown_table(("item", "cells", *KINDS), counts_table(timed_items()))
    return Block(PAGE, "\n".join(lines), "results/h200/papers, results/h200/speculation", "cells")


def counts_table(chosen: Sequence[Item]) -> list[list[str]]:
    """Return the rows of a table of counts: item, all cells, and the cells of each kind; at the end the sums."""
    lines, sums = [], Counter[str]()
    for item in chosen:
        counts = Counter(state.kind for state in cell_states(item))
        sums += counts
        lines.append([item.id, str(counts.total()), *(str(counts[kind]) for kind in KINDS)])
    return [*lines, ["all", str(sums.total()), *(str(sums[kind]) for kind in KINDS)]]
