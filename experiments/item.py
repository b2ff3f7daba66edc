"""The kinds of items: what a file of ``experiments/{cocktail,logquant,quantspec}`` declares.

An item is a table or a figure of a paper. A :class:`Grid` is a table of cells, each of which is folded from the samples
of one run: a row is a setting of kvbench, a column is a data set (or a point of time and memory) and a figure of its
rows. A :class:`Computed` item is anything else: a named fold of :mod:`experiments.fold` makes its cells. Both have a
caption and claims. Item files hold no machinery and no published number: numbers come from ``results/published``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Draw = Literal["table", "bars", "lines", "sweep", "heat", "boxes", "panels"]


@dataclass(frozen=True)
class Model:
    """A model of an item.

    Args:
        preset: choice of ``conf/model``, or anything else that ``model=`` takes.
        name: name in the table; also the published value of the CSV column ``model``. Empty: the preset.
    """

    preset: str
    name: str = ""

    @property
    def title(self) -> str:
        """The name in the table."""
        return self.name or self.preset


@dataclass(frozen=True)
class Row:
    """A setting of an item.

    Args:
        name: label in the table.
        setting: method, quantizer and options in the grammar of :mod:`kvbench.config.setting`; None where kvbench
            cannot run it, for the reason in `absent`.
        timed: setting for columns of time and memory, where it differs (random prompts have no similar chunks); empty:
            the same.
        small: setting with ``--data mini|standin``, where that differs (an encoder whose weights are on this machine);
            empty: the same.
        real: setting with ``--data real``, where that differs; empty: the same.
        published: columns of the published CSV and their values that select this row's cells.
        options: further overrides of this row's runs.
        choices: settings of which each cell shows the one with the shortest time per token (a search over gamma);
            empty: `setting` only, which otherwise is the one for points of time and memory.
        absent: reason why there is no run of a setting that kvbench cannot run.
        series, x: with ``draw="sweep"`` the line that the row is a point of, and its position.
    """

    name: str
    setting: str | None
    timed: str = ""
    small: str = ""
    real: str = ""
    published: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    absent: str = ""
    series: str = ""
    x: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of an item: a data set, and a figure that is folded from the rows of its runs.

    Args:
        name: heading.
        data: choice of ``conf/dataset``; ``efficiency`` for points of time and memory.
        task: the only task to run, for data sets with tasks; empty: all of the data set.
        over: data set whose prompts fp16 has answered, for ``data="fidelity/answers"``; the other fields are its.
        options: further overrides of the data set.
        figure: name in :data:`experiments.fold.figures.FIGURES`.
        scale: factor from kvbench's figure to the paper's unit (100 for scores in percent).
        unit: unit, for headings and axes.
        digits: decimals in tables.
        prompt, batch: of a point, for ``data="efficiency"``.
        prompts: other prompt lengths of single models, by preset (of models with a longer context).
        new_tokens: generated for each point, for ``data="efficiency"``.
        memory_gb: memory limit of the point in GiB (that of the paper's GPU); None: all of the device's.
        published: columns of the published CSV and their values that select this column's cells.
        value: column of the published CSV that holds the number; empty: the item's `value`.
        x: position on the axis of a figure; None: the columns are categories.
        panel: panel of the column in a picture with several, and the label of its y axis; empty: the item's `y`.
        inverse: True for a speed-up: the base row's figure, a time, divided by the row's.
        only: presets of the item's models that the column is of; empty: all.
    """

    name: str
    data: str
    task: str = ""
    over: str = ""
    options: tuple[str, ...] = ()
    figure: str = "score"
    scale: float = 100.0
    unit: str = "%"
    digits: int = 2
    prompt: int = 0
    batch: int = 0
    prompts: Mapping[str, int] = field(default_factory=dict)
    new_tokens: int = 128
    memory_gb: float | None = None
    published: Mapping[str, str] = field(default_factory=dict)
    value: str = ""
    x: float | None = None
    panel: str = ""
    inverse: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """A summary of columns: a mean (a paper's average, a group of tasks), or a limit of points of time and memory.

    Args:
        name: heading.
        columns: names of the columns; empty: all columns with the figure of the first.
        mini: names of the columns with ``--data mini``; empty: all.
        pick: ``mean`` over the columns; ``largest`` number of the columns that have one; or ``last``: the position `x`
            of the last column that has a number; both only where memory ended in one of the columns.
        unit: unit, where it is not that of the first column.
        published: columns of the published CSV and their values, if the paper prints the mean.
        value: as :class:`Column`.
    """

    name: str
    columns: tuple[str, ...] = ()
    mini: tuple[str, ...] = ()
    pick: Literal["mean", "largest", "last"] = "mean"
    unit: str = ""
    published: Mapping[str, str] | None = None
    value: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper as bounds on the difference of two rows in one column.

    What decides it is :data:`experiments.fold.claims.RULE`.

    Args:
        text: the statement in words.
        first, second: names of rows: the difference is first less second, over the same samples.
        column: name of a column or group.
        low, high: bounds in the column's unit; a name in ``results/published/<paper>_claims.csv`` stands for its
            number, with a minus sign before it for the negative.
        relative: True if the bounds are of first / second - 1, in percent.
    """

    text: str
    first: str
    second: str
    column: str
    low: float | str = 0.0
    high: float | str = math.inf
    relative: bool = False


@dataclass(frozen=True, kw_only=True)
class Item:
    """Fields that all items have.

    Args:
        id: ``paper/name``, the path of its module below ``experiments``.
        number: ``Table II``.
        title: what the paper calls it, in short.
        caption: the paper's setting; what it leaves open and what was chosen; where ours differs.
        points_caption: the rest of the caption, on points of time and memory, which ``--data real`` leaves out.
        models: the paper's models.
        published: name of a CSV in ``results/published`` without its ending; empty if the paper prints no numbers.
        value: column of that CSV that holds the number.
        words: claims of the paper that no difference of two cells can hold or refute.
        draw: kind of picture; ``table``: none; ``bars``: a bar per row, for each model or column; ``lines``: a line per
            row over the columns' `x`; ``sweep``: a line per series of rows over their `x`, in the last column (a group,
            if there is one); ``heat`` and ``boxes``: of a computed item's arrays.
        x, y: labels of the picture's axes, with units.
    """

    id: str
    number: str
    title: str
    caption: str
    points_caption: str = ""
    models: tuple[Model, ...] = ()
    published: str = ""
    value: str = "score"
    words: tuple[str, ...] = ()
    draw: Draw = "table"
    x: str = ""
    y: str = ""

    def caption_with(self, data: str) -> str:
        """Return the caption of a table with this choice of ``--data``."""
        return self.caption if data == "real" else f"{self.caption} {self.points_caption}".rstrip()

    @property
    def paper(self) -> str:
        """The paper, as its folder is named."""
        return self.id.partition("/")[0]


#: the bundled tasks that lose most at 2 bits, as ``dataset=mini`` has them; tiny is right on all of them at fp16
MINI = tuple(
    Column(name.replace("_", " "), "mini", task=name)
    for name in ("key_value", "key_value_hex", "multi_value", "copy_long", "repeat")
)


@dataclass(frozen=True, kw_only=True)
class Grid(Item):
    """A table of cells: rows are settings, columns are data and figures; one table for each model.

    Args:
        rows: settings, in the paper's order.
        columns: data sets and figures, in the paper's order.
        groups: means over columns, shown behind the columns.
        base: name of the row that paired differences are taken to; empty: none.
        along: with ``draw="sweep"`` the name of the column whose cells are the positions; empty: the rows' `x`.
        claims: statements that the cells can hold or refute.
        mini: the columns with ``--data mini``. Columns of time and memory stay as they are, unless `no_points`.
        mini_groups: the groups with ``--data mini``; None: `groups`.
        no_points: True if ``--data mini`` has no columns of time and memory.
        real: columns with ``--data real``, which has no times; None: those of `columns` that are no times.
        only_groups: True if the table shows the groups alone.
    """

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...] = ()
    base: str = ""
    along: str = ""
    claims: tuple[Claim, ...] = ()
    mini: tuple[Column, ...] = MINI
    mini_groups: tuple[Group, ...] | None = None
    no_points: bool = False
    real: tuple[Column, ...] | None = None
    only_groups: bool = False


@dataclass(frozen=True)
class Described:
    """A data set of a table of data sets (``compute="statistics:of_datasets"``).

    Args:
        name: name in the table, with task and metric.
        data: the data set, and its task; only `data`, `task`, `options` and `published` of the column count.
    """

    name: str
    data: Column


@dataclass(frozen=True, kw_only=True)
class Computed(Item):
    """An item whose cells are computed by a function rather than folded from runs.

    Args:
        compute: ``module:function`` below ``experiments.fold``. It is called with the item and the
            :class:`~experiments.data.Plan`, and returns a :class:`~experiments.fold.cells.Folded`.
        options: what the function is to know of this item.
        needs: what it needs beside the bundled model, for the list.
    """

    compute: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
