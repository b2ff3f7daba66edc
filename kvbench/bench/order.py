"""The order of a command's measurements: setting by setting, or all points in a random order (``--shuffle``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvbench.methods.base import Method
from kvbench.tasks.work import MeasurePoint

Row = dict[str, Any]
#: function of prompt length and batch size that measures a point and returns its record
Measure = Callable[[int, int], Row]


def ways(bench: Any) -> Iterator[tuple[Row, Measure, Method]]:
    """Yield, for each setting and kind of steps, the first entries of its rows, its measurement and its method."""
    both = bench.args.eager and bench.args.graphs == "always"
    for setting, method in bench.methods:
        for graphs in ["always", "never"] if both else [bench.args.graphs]:
            start = {"setting": setting.text, "graphs": graphs, "compile": bench.args.compile}
            yield start, partial(bench._point, bench.meter(method, graphs)), method


def shuffled(bench: Any) -> None:
    """Measure the points of all settings in a random order, which ``--shuffle`` seeds."""
    order = [(way, sample.work) for way in list(ways(bench)) for sample in bench.grid.samples()]
    random.Random(bench.args.shuffle).shuffle(order)
    for (start, measure, method), point in order:
        assert isinstance(point, MeasurePoint)
        bench.add({**start, **bench._attempt(measure, point.prompt, point.batch)})
        method.detach(bench.model)
