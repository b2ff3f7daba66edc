"""``python -m kvbench.report --by-position``: fidelity over the tokens of an answer, and where answers part."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.report_runs import find_run
from kvbench.errors import ConfigError, KvbenchError
from kvbench.results import summary
from kvbench.results.aggregate import score_key
from kvbench.results.labels import labels
from kvbench.results.positions import HEADINGS, Curve, Stretch, answer_curve, fidelity_stretches, survival
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.util.requirements import Package, check_packages, check_writable
from kvbench.util.table import Cell, Grid, fit, printable, render_text

#: measures with a logarithmic axis in plots
_LOGARITHMIC = ("kld_mean", "kld_p99")


def add_position_options(parser: argparse.ArgumentParser, what: Any) -> None:
    """Add ``--width``, ``--base`` and ``--plot`` to the parser, and ``--by-position`` to its exclusive group `what`."""
    what.add_argument(
        "--by-position",
        metavar="RUN",
        nargs="+",
        help="show runs by the number of decoded tokens: of dataset=fidelity the distance from fp16's predictions, of "
        "other runs the share of answers that still equal the fp16 run's",
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="with --by-position: stretches of N tokens (default: 1, 2, 4, 8, ...)"
    )
    parser.add_argument(
        "--base",
        metavar="RUN",
        help="with --by-position: the run, or the folder of one, whose answers the others are compared with "
        "(default: the fp16 run with the same model, data, decoding and seed)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --by-position: also draw it (kvbench[plot])")


def base_run(stores: Sequence[RunStore], name: str) -> RunStore:
    """Return the run in the folder `name`, or the one of `stores` whose id begins so; raise KvbenchError if none is."""
    folder = Path(name).absolute()
    return RunStore(folder.parent, folder.name) if (folder / "config.yaml").is_file() else find_run(stores, name)


def check_position_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option of ``--by-position`` is given without it, has no valid value, or cannot be used.

    Raises:
        MissingPackageError: ``--plot`` needs matplotlib.
    """
    for name in ("width", "base", "plot"):
        value = getattr(arguments, name)
        if value is not None and not arguments.by_position:
            raise ConfigError(f"--{name}", value, "needs --by-position", hint="add --by-position RUN")
    if arguments.width is not None and arguments.width < 1:
        raise ConfigError("--width", arguments.width, "is not a number of tokens", hint="--width 256")
    if arguments.plot is not None:
        check_packages([Package("matplotlib", "--plot", str(arguments.plot), "run pip install 'kvbench[plot]'")])
        check_writable(str(arguments.plot), "--plot", file=True)


def show_positions(arguments: argparse.Namespace, chosen: Sequence[RunStore], base: RunStore | None) -> int:
    """Print the tables of ``--by-position`` for the runs `chosen`, and draw its plot; return the exit status.

    Raises:
        KvbenchError: a run has no figures by position, or no run to be compared with.
    """
    whole = [metrics for store in chosen if (metrics := store.metrics())]
    beside = ("model", "dataset")
    names = labels(whole, beside=beside) if len(whole) == len(chosen) else [store.run_id for store in chosen]
    curves = [
        curve
        for store, name in zip(chosen, names, strict=True)
        for curve in _curves(store, name, base, arguments.width)
    ]
    if arguments.format == "csv":
        print(positions_csv(curves), end="")
    elif arguments.format == "markdown":
        print("\n".join(map(_markdown, curves)), end="")
    else:
        for curve in curves:
            head, lines = _curve_cells(curve)
            print(printable(f"{curve.run}  {curve.task}"))
            print(render_text(Grid(head, [[Cell(*cell) for cell in line] for line in lines], wraps=()).fitted(fit())))
            print("".join(f"{line}\n" for line in _changes_line(curve)))
    if arguments.plot is not None:
        _draw(curves, arguments.plot, arguments.width is None)
    return 0


def _curves(store: RunStore, name: str, base: RunStore | None, width: int | None) -> list[Curve]:
    """Return the curves of a run, one per task and kind."""
    groups: dict[str, dict[str, Row]] = {}
    for sample, row in store.samples().rows.items():
        if not row.get("warm_up"):
            groups.setdefault(score_key(row), {})[sample] = row
    curves: list[Curve | None] = []
    if any(row.get("fidelity") for rows in groups.values() for row in rows.values()):
        for task, rows in groups.items():
            stretches = fidelity_stretches(list(rows.values()), width)
            curves.append(Curve(name, task, stretches) if stretches else None)
            left = [part["left"] for row in rows.values() if (part := row.get("fidelity")) and part["left"]]
            curves.append(Curve(name, f"{task}, first choices", survival(left, width)) if left else None)
    else:
        base = base or summary.baseline(store)
        if base is None:
            raise KvbenchError(
                f"{store.run_id}: there is no fp16 run with the same model, data, decoding and seed.\n"
                "  hint: run the same command with method=fp16, or name another run: --base RUN"
            )
        others = base.samples().rows
        curves = [answer_curve(name, task, others, rows, width) for task, rows in groups.items()]
    drawn = [curve for curve in curves if curve is not None]
    if not drawn:
        raise KvbenchError(
            f"{store.run_id}: its samples have neither answers of more than one token nor compared predictions.\n"
            "  hint: python -m kvbench method=kivi dataset=fidelity/answers"
        )
    return drawn


def positions_csv(curves: Sequence[Curve]) -> str:
    """Return curves as CSV, one line per measure of each stretch; changes of scores are lines without a stretch."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["run", "task", "measure", "first", "last", "n", "samples", "value", "low", "high"])
    for curve in curves:
        heading = printable(curve.run), printable(curve.task)
        for stretch in curve.stretches:
            place = stretch.first, stretch.last, stretch.n, stretch.samples
            writer.writerows([*heading, name, *place, *stretch.figures[name]] for name in _measures(curve))
        changes = curve.changes or {}
        for name in ("lower", "higher", "mean", "stderr", "p"):
            if name in changes:
                writer.writerow([*heading, f"score_{name}", "", "", "", changes["n"], changes[name], "", ""])
    return buffer.getvalue()


def _markdown(curve: Curve) -> str:
    head, lines = _curve_cells(curve)
    rows = [f"{curve.run}, {curve.task}:", "", "| " + " | ".join(head) + " |", "|--:" * len(head) + "|"]
    for line in lines:
        texts = (f"{main} ({interval})" if interval else main for main, interval in line)
        rows.append("| " + " | ".join(texts) + " |")
    rows += ["", *_changes_line(curve)] if curve.changes else []
    return "\n".join(map(printable, rows)) + "\n"


def _measures(curve: Curve) -> list[str]:
    return [name for name in HEADINGS if curve.stretches and name in curve.stretches[0].figures]


def _curve_cells(curve: Curve) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return the headings of a curve's table, and its lines of cells: a text, and the interval beside it or ""."""
    names = _measures(curve)
    parted = "still_equal" in names
    head = ["after tokens", "going on", "answers"] if parted else ["tokens", "positions", "samples"]
    lines = [
        [
            (str(one.first) if one.first == one.last else f"{one.first} to {one.last}", ""),
            (str(one.n), ""),
            (str(one.samples), ""),
            *(_figure_texts(name, one) for name in names),
        ]
        for one in curve.stretches
    ]
    units = [HEADINGS[name] + ("" if name in _LOGARITHMIC else ", %") for name in names]
    return [*head, *units], lines


def _figure_texts(name: str, stretch: Stretch) -> tuple[str, str]:
    def shown(number: float) -> str:
        return f"{number:.3g}" if name in _LOGARITHMIC else f"{100 * number:.2f}"

    value, low, high = stretch.figures[name]
    return shown(value), "" if low is None or high is None else f"{shown(low)} to {shown(high)}"


def _changes_line(curve: Curve) -> list[str]:
    """Return a line about the scores that changed; no line without scores."""
    changes = curve.changes
    if changes is None:
        return []
    share = (changes["lower"] + changes["higher"]) / changes["n"]
    error = "" if changes["stderr"] is None else f" ± {changes['stderr']:.3f} (standard error)"
    return [
        f"score changed in {share:.1%} of {changes['n']} samples: {changes['lower']} lower, {changes['higher']} higher "
        f"(sign test p = {changes['p']:.3g}); mean change {changes['mean']:+.3f}{error}"
    ]


def _draw(curves: Sequence[Curve], path: Path, doubling: bool) -> None:
    """Draw a panel per measure, with a line per curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = [name for name in HEADINGS if any(name in _measures(curve) for curve in curves)]
    figure, panels = pyplot.subplots(1, len(measures), figsize=(5 * len(measures), 4), squeeze=False)
    for name, axes in zip(measures, panels[0], strict=True):
        for curve in curves:
            if name not in _measures(curve):
                continue
            places = [
                (one.first * one.last) ** 0.5 if doubling else (one.first + one.last) / 2 for one in curve.stretches
            ]
            figures = [one.figures[name] for one in curve.stretches]
            (line,) = axes.plot(places, [value for value, *_ in figures], marker=".", label=f"{curve.run} {curve.task}")
            ends = [(value if low is None else low, value if high is None else high) for value, low, high in figures]
            axes.fill_between(places, *zip(*ends, strict=True), color=line.get_color(), alpha=0.15)
        axes.set(xlabel="decoded tokens", ylabel=HEADINGS[name])
        if doubling:
            axes.set_xscale("symlog", base=2, linthresh=1)
        if name in _LOGARITHMIC:
            axes.set_yscale("log")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
