"""The fold of a grid: runs to cells, over the samples that all settings of a column have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments import published
from experiments.data import POINTS, Plan, columns_of, groups_of, scaled, too_long
from experiments.fold.cells import FORMAT_ONLY, OUT_OF_MEMORY, Cell, Folded, Heading, Verdict, interval_fields
from experiments.fold.claims import ALL_ROWS, APART, FLOOR, OPEN, judge
from experiments.fold.figures import FIGURES, SPEEDS, Row, Statistic, paired, quotient
from experiments.fold.means import combined_error, interval_of, needed_of, open_with
from experiments.fold.rows import floor_notes, floored, rows_at_hand
from experiments.item import Claim, Column, Grid, Group, Model
from experiments.item import Row as Setting
from kvbench.metrics.intervals import Interval


@dataclass(frozen=True)
class Source:
    """The rows behind a cell.

    Args:
        rows: rows by sample id.
        runs: ids of their runs.
        reason: why there are none.
        note: device and the like.
    """

    rows: Mapping[str, Row]
    runs: tuple[str, ...] = ()
    reason: str = ""
    note: str = ""


#: the sources of a grid: (model title, row name, column name) -> rows
Sources = Mapping[tuple[str, str, str], Source]


def fold_grid(item: Grid, plan: Plan, sources: Sources, notes: Sequence[str] = ()) -> Folded:
    """Return the cells of a grid, from the rows behind each of them; `notes` are shown below the table."""
    columns = columns_of(item, plan)
    groups = groups_of(item, plan)
    cells: list[Cell] = []
    verdicts: list[Verdict] = []
    for model in plan.models_of(item):
        table = _Table(item, plan, model, columns, sources)
        for row in item.rows:
            cells += [table.cell(row, column) for column in table.columns]
            cells += [table.mean(row, group) for group in groups]
        verdicts += [table.judged(number) for number in range(len(item.claims)) if table.has(number)]
    first = columns[0]
    if plan.models_of(item):  # units are the same for all models of a plan
        columns = tuple(scaled(column, plan, plan.models_of(item)[0]) for column in columns)
    headings = [Heading(c.name, c.unit, c.digits, c.x, c.panel) for c in columns]
    if item.only_groups:
        headings = []
    for group in groups:  # the mean of one column is that column
        if item.only_groups or len(of_group(group, columns, plan)) > 1:
            digits = 0 if group.pick == "last" else first.digits
            headings.append(Heading(group.name, group.unit or first.unit, digits, mean=True))
    notes = [*notes, *measured_on(cells)]
    notes = [*notes, *(note for model in plan.models_of(item) for note in floor_notes(columns, plan, model))]
    return Folded(
        headings,
        [row.name for row in item.rows],
        [model.title for model in plan.models_of(item)],
        cells,
        base=item.base,
        verdicts=verdicts,
        notes=notes,
        marks=[FORMAT_ONLY] if plan.data == "standin" else [],
    )


def measured_on(cells: Sequence[Cell]) -> list[str]:
    """Return a note on the devices that made the cells; none without any.

    Behind the one with most cells stand the others, each with its rows, and with the columns where those are not all.
    """
    noted = [cell for cell in cells if cell.note]
    by_note = Counter(cell.note for cell in noted).most_common()
    whole = Counter((cell.model, cell.row) for cell in noted)
    several = len({cell.model for cell in noted}) > 1
    texts = []
    for note, _ in by_note:
        choice, _, device = note.rpartition("; ")
        text = f"{device} ({choice})" if choice else note
        places: dict[tuple[str, str], list[str]] = {}
        for cell in noted:
            if cell.note == note:
                places.setdefault((cell.model, cell.row), []).append(cell.column)
        names = {place: ", ".join(filter(None, place if several else place[1:])) for place in places}
        rows = [
            names[place] + (f" ({', '.join(columns)})" if len(columns) < whole[place] else "")
            for place, columns in places.items()
        ]
        named = f": {'; '.join(rows)}" if texts or choice else ""
        texts.append(f"{'On' if texts else 'Measured on:'} {text}{named}.")
    return [" ".join(texts)] if texts else []


def shared_samples(sources: Iterable[Source]) -> list[str]:
    """Return the ids of the samples that all sources with rows have."""
    begun = [set(source.rows) for source in sources if source.rows]
    return sorted(set.intersection(*begun)) if begun else []


def shared_counts(sources: Sources) -> dict[str, int]:
    """Return the largest number of samples that all rows of a column have, by the column's name."""
    by_column: dict[tuple[str, str], list[Source]] = {}
    for (model, _, column), source in sources.items():
        by_column.setdefault((model, column), []).append(source)
    counts: dict[str, int] = {}
    for (_, column), own in by_column.items():
        counts[column] = max(counts.get(column, 0), len(shared_samples(own)))
    return counts


class _Table:
    """The cells of one model."""

    def __init__(self, item: Grid, plan: Plan, model: Model, columns: Sequence[Column], sources: Sources) -> None:
        self.item, self.plan, self.model, self.sources = item, plan, model, sources
        self.columns = [scaled(column, plan, model) for column in columns]
        self.groups = groups_of(item, plan)
        self.statistics: dict[tuple[str, str], Statistic] = {}
        self.counts: dict[str, int] = {}
        for column in self.columns:
            self._fill(column)

    def _fill(self, column: Column) -> None:
        """Compute a column's figure for all rows, over the samples that all of them have."""
        by_row = {row.name: self.source(row, column) for row in self.item.rows}
        shared = shared_samples(by_row.values())
        self.counts[column.name] = len(shared)
        by_name = {
            name: FIGURES[column.figure]([source.rows[i] for i in shared])
            for name, source in by_row.items()
            if shared and source.rows
        }
        base = by_name.get(self.item.base)
        for name, figure in by_name.items():
            if figure is not None and column.inverse:
                figure = quotient(base, figure) if base is not None else None
            if figure is not None:
                influences = tuple(column.scale * number for number in figure.influences)
                self.statistics[name, column.name] = Statistic(column.scale * figure.value, influences)

    def source(self, row: Setting, column: Column) -> Source:
        return self.sources.get((self.model.title, row.name, column.name), Source({}, reason="not run"))

    def cell(self, row: Setting, column: Column) -> Cell:
        """Return the cell of a row and column."""
        source, figure = self.source(row, column), self.statistics.get((row.name, column.name))
        place = (self.model.title, row.name, column.name)
        paper = self._paper(row, column.published, column.value)
        if figure is None:
            reason = source.reason or self._why_empty(source, column)
            return Cell(*place, paper, reason=reason, runs=source.runs)
        return Cell(
            *place,
            paper,
            ours=figure.value,
            stderr=figure.stderr,
            n=self.counts[column.name],
            runs=source.runs,
            note=source.note,
            **interval_fields(interval_of([figure], [column])),
            **self._to_base(row, [column]),
        )

    def _to_base(self, row: Setting, members: Sequence[Column], pick: str = "mean") -> dict[str, float | None]:
        """Return the fields of a cell with its paired difference to the base row; none for the base's own runs."""
        if all(self._of_base(row, column) for column in members):
            return {}
        known = self.difference(row.name, self.item.base, members, pick)
        if known is None:
            return {}
        return {"to_base": known[0], "to_base_stderr": known[1], **interval_fields(known[2], "to_base_")}

    def _of_base(self, row: Setting, column: Column) -> bool:
        """Return True if a cell and the base row's rest on the same runs: a sweep passes through its base setting."""
        if row.name == self.item.base:
            return True
        base = self.sources.get((self.model.title, self.item.base, column.name))
        runs = self.source(row, column).runs
        # files of points hold several settings each
        return bool(base and runs) and base.runs == runs and not any(name.endswith(".json") for name in runs)

    def _why_empty(self, source: Source, column: Column) -> str:
        if not source.rows:
            return "not run"
        if not self.counts[column.name]:
            return "no sample that all settings have done"
        return "a run of this setting does not have this figure"

    def mean(self, row: Setting, group: Group) -> Cell:
        """Return the unweighted mean over the columns of a group, or what the group picks of them."""
        members = self.members(group)
        place = (self.model.title, row.name, group.name)
        paper = None if group.published is None else self._paper(row, group.published, group.value)
        whole = self._whole(row.name, members, group.pick)
        runs = tuple(dict.fromkeys(run for column in members for run in self.source(row, column).runs))
        if whole is None:
            missing = [column for column in members if (row.name, column.name) not in self.statistics]
            reason = self.cell(row, missing[0]).reason if missing else "no columns"
            if group.pick != "mean":
                reason = "not measured until memory ended"
            return Cell(*place, paper, reason=reason, runs=runs)
        own = [self.statistics[row.name, column.name] for column in members] if group.pick == "mean" else []
        return Cell(
            *place,
            paper,
            ours=whole[0],
            stderr=whole[1],
            n=sum(self.counts[column.name] for column in members) if group.pick == "mean" else 1,
            runs=runs,
            **interval_fields(interval_of(own, members)),
            **self._to_base(row, members, group.pick),
        )

    def members(self, group: Group) -> list[Column]:
        """Return the columns of a group under the plan."""
        return of_group(group, self.columns, self.plan)

    def difference(
        self, first: str, second: str, members: Sequence[Column], pick: str = "mean"
    ) -> tuple[float, float | None, Interval | None] | None:
        """Return the mean over columns of the paired differences of two rows, with its standard error and interval.

        Of a group that picks a number, the difference of the numbers picked, without an error.
        """
        if pick != "mean":
            one, two = (self._whole(name, members, pick) for name in (first, second))
            return None if one is None or two is None else (one[0] - two[0], None, None)
        ones, twos = ([self.statistics.get((name, c.name)) for c in members] for name in (first, second))
        if not members or None in ones or None in twos:
            return None
        own, other = [one for one in ones if one is not None], [two for two in twos if two is not None]
        pairs = [paired(a, b) for a, b in zip(own, other, strict=True)]
        mean = fmean(value for value, _ in pairs)
        return mean, combined_error([error for _, error in pairs]), interval_of(own, members, other)

    def has(self, number: int) -> bool:
        """Return True if the column of a claim exists under the plan."""
        columns = self._of(self.item.claims[number].column)
        own = self.model in self.item.models  # a cell that the paper has of another model only
        return any(not (own and c.only) or self.model.preset in c.only for c in columns)

    def judged(self, number: int) -> Verdict:
        """Return what the cells say to a claim; of a group's sets at the floor, the claim is judged without them."""
        claim = self.item.claims[number]
        rows = {row.name: row for row in self.item.rows}
        members = self._of(claim.column)
        group = next((g for g in self.groups if g.name == claim.column), None)
        lost = floored(members, self.plan, self.model)
        above = [column for column in members if column.name not in lost]
        if group is not None and lost and above:
            members, group = above, replace(group, columns=tuple(column.name for column in above))

        def cell(name: str) -> Cell | None:
            return self.mean(rows[name], group) if group else self.cell(rows[name], members[0])

        difference = self.difference(claim.first, claim.second, members, group.pick if group else "mean")
        if difference is None and claim.relative and group is None:
            values = [self.statistics.get((name, members[0].name)) for name in (claim.first, claim.second)]
            if all(value is not None for value in values):
                difference = values[0].value - values[1].value, None, None  # type: ignore[union-attr]
        models = [self.model] if self.plan.compares(self.item, self.model) else self.item.models
        only = [column.name for column in members] if lost and above else []
        values = [printed(self.item, rows[name], claim.column, models, only) for name in (claim.first, claim.second)]
        column = members[0]
        sized = column.data == POINTS or column.figure in SPEEDS
        standing_in = sized and self.model not in self.item.models
        verdict = judge(claim, self.item.paper, self.model.title, column, cell, difference, values, standing_in)
        if verdict.verdict == OPEN and len(members) > 1:
            verdict = replace(verdict, needed=needed_of(verdict, column.scale))
        apart = [
            source.reason for m in members if (source := self.source(rows[claim.first], m)).reason.startswith(APART)
        ]
        reason = too_long(column, self.plan, self.model) or "".join(apart[:1]).removeprefix(f"{APART}: ")
        if reason:
            return replace(verdict, verdict=APART, reason=reason)
        if lost and not above:  # run or not: no run could say anything
            reason = f"fp16 is not shown to be above answers that know nothing ({', '.join(lost)})"
            return replace(verdict, verdict=FLOOR, reason=reason, needed=None)
        labels = [verdict.label] if verdict.label else []
        labels += [f"without sets at the floor: {', '.join(lost)}"] if lost else []
        labels += [ALL_ROWS] if self._short_of_rows(verdict, claim, members) else []
        return replace(verdict, label="; ".join(labels))

    def _short_of_rows(self, verdict: Verdict, claim: Claim, members: Sequence[Column]) -> bool:
        """Return True if all rows at hand of its data sets would leave a claim undecided, with ``real``."""
        if self.plan.data != "real" or verdict.verdict != OPEN or verdict.least is None:
            return False
        own, other = ([self.statistics[name, c.name] for c in members] for name in (claim.first, claim.second))
        rows = [rows_at_hand(column, self.plan, self.counts[column.name]) for column in members]
        return open_with(verdict, own, other, members, rows)

    def _of(self, name: str) -> list[Column]:
        group = next((g for g in self.groups if g.name == name), None)
        return self.members(group) if group else [c for c in self.columns if c.name == name]

    def _whole(self, row: str, members: Sequence[Column], pick: str) -> tuple[float, float | None] | None:
        """Return the mean over columns with its standard error, or the number that a group picks."""
        if pick == "mean":
            return self._mean(row, members)
        setting = next(one for one in self.item.rows if one.name == row)
        if not any(self.source(setting, column).reason.startswith(OUT_OF_MEMORY) for column in members):
            return None  # the largest of those tried says nothing
        known = [column for column in members if (row, column.name) in self.statistics]
        if pick == "last":
            return max(((column.x or 0.0, None) for column in known), default=None)
        return max(((self.statistics[row, column.name].value, None) for column in known), default=None)

    def _mean(self, row: str, members: Sequence[Column]) -> tuple[float, float | None] | None:
        figures = [self.statistics.get((row, column.name)) for column in members]
        known = [figure for figure in figures if figure is not None]
        if not known or len(known) < len(figures):
            return None
        return fmean(figure.value for figure in known), combined_error([figure.stderr for figure in known])

    def _paper(self, row: Setting, keys: Mapping[str, str], value: str) -> float | None:
        """Return the published number; None unless it is of this model and these data."""
        if not (self.item.published and keys and row.published and self.plan.compares(self.item, self.model)):
            return None
        return looked_up(self.item, self.model, row, keys, value)


def of_group(group: Group, columns: Sequence[Column], plan: Plan) -> list[Column]:
    """Return the columns that a group names under a plan, or those with the figure of the first."""
    names = group.mini if plan.data == "mini" else group.columns
    return [c for c in columns if (c.name in names if names else c.figure == columns[0].figure)]


def looked_up(item: Grid, model: Model, row: Setting, keys: Mapping[str, str], value: str) -> float | None:
    """Return the published number of a model, a row and a column's keys."""
    named = {"model": model.name} if model.name and "model" in published.published_lines(item.published)[0] else {}
    return published.lookup(item.published, {**named, **row.published, **keys}, value or item.value)


def printed(item: Grid, row: Setting, name: str, models: Sequence[Model], only: Sequence[str] = ()) -> float | None:
    """Return the paper's number of a row in a column or group of its own, as a mean over `models`; None without one.

    `only` are the columns of a group that count; empty: all of them, and the mean that the paper prints.
    """
    if not item.published or not row.published:
        return None
    group = next((g for g in item.groups if g.name == name), None)
    if group is not None and group.published is not None and not only:
        places = [(group.published, group.value)]
    else:
        wanted = only or (group.columns if group is not None else (name,))
        columns = [c for c in item.columns if (c.name in wanted if wanted else c.figure == item.columns[0].figure)]
        places = [(column.published, column.value) for column in columns]
        if only and not all(keys for keys, _ in places):
            return None
    values = [looked_up(item, model, row, keys, value) for model in models for keys, value in places if keys]
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
