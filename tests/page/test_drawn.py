"""What the plots of the page show, told by the calls that a stand-in for matplotlib receives."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvbench.page.figures import write_plots

MIB = 2**20
NAMES = {"a": "recall", "b": "copy"}


def run(label: str, number: int, group: str = "g", **entries: Any) -> dict[str, Any]:
    return {"id": f"{group}-{number}", "status": "ok", "label": label, "name": f"{label} ({number})", **entries}


RUNS = [
    run("fp16", 0, score=[0.9, 0.01], kv=8 * MIB, tpot=0.01, tasks=[["a", 0.9, 0.1, 5]], bill=[0, 0, 8 * MIB, 0]),
    run(
        "kivi int4",
        1,
        score=[0.8, 0.02],
        kv=4 * MIB,
        tpot=0.02,
        tasks=[["a", 0.8, 0.1, 5, -0.7], ["b", 0.7, 0.1, 5, 1.0]],
        bill=[2 * MIB, MIB, MIB / 2, MIB / 2],
        tpots=[0.01, 0.02, 0.03, 0.04, 0.05, 9],
    ),
    run("kivi int2", 2, score=[0.7, 0.03], kv=2 * MIB, tpot=0.03),
    run(
        "atom", 3, score=[0.85], kv=MIB, tpot=0.04, tasks=[["b", 0.8, 0.1, 5, 0.75]], tpots=[0.02, 0.03, 0.04, 0.05, 1]
    ),
]
POINTS = [
    run("kivi int4", 4, "p", points=[[4096, 2, 0, 0.3, 0.02], [1000, 2, 0, 0.1, 0.01], [4096, 1, 0, 0.1, 0.05]]),
    run("fp16", 5, "p", points=[[4096, 2, 0, 0.6, 0.04], [8192, 2, 0, 0.9, None]]),
]


def drawn(runs: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any, str]:
    """For each plot its axes; then pyplot, and the title."""
    pyplot, plots = MagicMock(), {}

    def subplots(**options: Any) -> tuple[Any, Any]:
        figure, axes = MagicMock(), MagicMock(size=options["figsize"])
        axes.bxp.side_effect = lambda boxes, **options: {"boxes": [MagicMock() for _ in boxes]}
        axes.figure = figure
        figure.savefig.side_effect = lambda path, **options: plots.setdefault(path.name, axes)
        return figure, axes

    pyplot.subplots.side_effect = subplots
    module = ModuleType("matplotlib")
    module.use, module.pyplot = MagicMock(), pyplot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", module)
    title, files = write_plots({"runs": runs, "groups": {"g": "mini", "p": "times"}, "tasks": NAMES}, folder)
    assert [path.name for path in files] == list(plots) and {path.parent for path in files} <= {folder}
    assert pyplot.close.call_count * 2 == len(files)
    return {name.removesuffix(".png"): axes for name, axes in plots.items() if name.endswith(".png")}, pyplot, title


def test_scores_stand_over_their_costs_with_errors_and_a_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method has its colour and marker, and is named once; costs that differ much are on a logarithmic scale."""
    plots, _, title = drawn([*RUNS, run("kivi int4", 9, "other", score=[0.1])], tmp_path, monkeypatch)
    assert title == "mini" and plots["score-bytes"].figure.suptitle.call_args.args == ("mini",)
    kivi, atom = {"color": "#56B4E9", "marker": "^"}, {"color": "#E69F00", "marker": "s"}
    wanted = [
        (8.0, 0.9, 0.01, "fp16", {"color": "#000000", "marker": "o"}),
        (4.0, 0.8, 0.02, "kivi", kivi),
        (2.0, 0.7, 0.03, None, kivi),
        (1.0, 0.85, None, "atom", atom),
    ]
    calls = plots["score-bytes"].errorbar.call_args_list
    assert [(*c.args, c.kwargs["yerr"], c.kwargs["label"]) for c in calls] == [each[:4] for each in wanted]
    assert [{key: c.kwargs[key] for key in ("color", "marker")} for c in calls] == [each[4] for each in wanted]
    assert plots["score-bytes"].step.call_args.args == ((1.0, 8.0), (0.85, 0.9))
    assert plots["score-bytes"].set_xscale.call_args.args == ("log",)
    assert plots["score-bytes"].set.call_args.kwargs["ylabel"] == "score (mean over tasks)"
    times = plots["score-tpot"]
    assert [round(c.args[0], 9) for c in times.errorbar.call_args_list] == [10.0, 20.0, 30.0, 40.0]
    assert not times.set_xscale.called and times.step.call_args.args == ((pytest.approx(10.0),), (0.9,))


def test_perplexities_are_better_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        run("fp16", 0, ppl=[5.0, 0.1], kv=8 * MIB),
        run("kivi", 1, ppl=[6.0, 0.1], kv=2 * MIB, tasks=[["a"] * 4 + [1.0]]),
    ]
    plots, _, _ = drawn(runs, tmp_path, monkeypatch)
    assert set(plots) == {"score-bytes", "differences"}
    axes = plots["score-bytes"]
    assert axes.step.call_args.args == ((2.0, 8.0), (6.0, 5.0)) and axes.set.call_args.kwargs["ylabel"] == "perplexity"
    assert plots["differences"].imshow.call_args.kwargs["cmap"] == "PuOr_r", "a higher perplexity is a loss"


def test_differences_are_cells_of_run_and_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that was not measured is empty; figures on dark cells are white."""
    axes = drawn(RUNS, tmp_path, monkeypatch)[0]["differences"]
    (numbers,), options = axes.imshow.call_args
    assert [[None if math.isnan(value) else value for value in line] for line in numbers] == [[-0.7, 1.0], [None, 0.75]]
    assert (options["cmap"], options["vmin"], options["vmax"]) == ("PuOr", -1.0, 1.0)
    cells = [(c.args[0], c.args[1], c.kwargs["color"]) for c in axes.annotate.call_args_list]
    assert cells == [("-0.70", (0, 0), "black"), ("+1.00", (1, 0), "white"), ("+0.75", (1, 1), "white")]
    assert axes.set_yticks.call_args.args == (range(2), ["kivi int4 (1)", "atom (3)"])
    assert axes.set_xticks.call_args.args == (range(2), ["recall", "copy"])
    assert axes.size == (6.5, pytest.approx(1.84))


def test_bytes_are_bars_of_parts_and_times_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots, _, _ = drawn(RUNS, tmp_path, monkeypatch)
    bars = plots["bytes"].barh.call_args_list  # by part: of KIVI, then of fp16, which has more bytes
    assert [c.args[1] for c in bars] == [[2.0, 0.0], [1.0, 0.0], [0.5, 8.0], [0.5, 0.0]]
    assert [c.kwargs["left"] for c in bars] == [[0.0, 0.0], [2.0, 0.0], [3.0, 0.0], [3.5, 8.0]]
    assert [c.kwargs["label"].split()[0] for c in bars] == ["packed", "scales", "tokens", "indices"]
    assert plots["bytes"].set_yticks.call_args.args == (range(2), ["kivi int4 (1)", "fp16 (0)"])
    boxes = plots["tpot"].bxp.call_args.args[0]  # in ms, the slowest first
    assert [list(box) for box in boxes] == [["whislo", "q1", "med", "q3", "whishi"]] * 2
    assert [[round(value) for value in box.values()] for box in boxes] == [[20, 30, 40, 50, 1000], [10, 20, 30, 40, 50]]
    assert plots["tpot"].set_yticks.call_args.args == (range(1, 3), ["atom (3)", "kivi int4 (1)"])
    assert "ttft" not in plots and not any(name.startswith("points") for name in plots)


def test_points_are_lines_over_the_prompt_at_the_batch_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots, _, _ = drawn([*RUNS, *POINTS], tmp_path, monkeypatch)
    assert {name for name in plots if name.startswith("points")} == {"points-tpot", "points-ttft"}
    axes = plots["points-tpot"]
    lines = [
        ([round(x) for x in c.args[0]], [round(y) for y in c.args[1]], c.kwargs["label"])
        for c in axes.plot.call_args_list
    ]
    assert lines == [([1000, 4096], [10, 20], "kivi int4 (4)"), ([4096], [40], "fp16 (5)")]
    assert [c.kwargs["color"] for c in axes.plot.call_args_list] == ["#E69F00", "#000000"]
    assert axes.set_xticks.call_args.args == ([1000, 4096], ["1000", "4k"])
    assert axes.set_xscale.call_args.kwargs == {"base": 2} and axes.set_yscale.call_args.args == ("log",)
    assert axes.set.call_args.kwargs["xlabel"] == "prompt tokens (batch 2)"
    assert axes.figure.suptitle.call_args.args == ("times",) and axes.figure.legend.call_count == 1
    single = drawn([POINTS[1]], tmp_path, monkeypatch)[0]["points-tpot"]
    assert not single.set_xscale.called and single.set_xticks.call_args.args == ([4096], ["4k"])


def test_texts_are_drawn_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mathematics in them, nothing that is no character, and not too long."""
    odd = run("a$b \ud83d", 1, score=[0.5], kv=MIB, tasks=[["a", 0, 0, 0, 0.0]], bill=[1, 1, 1, 1])
    plots, _, _ = drawn([{**odd, "name": "x" * 45}], tmp_path, monkeypatch)
    assert plots["score-bytes"].errorbar.call_args.kwargs["label"] == r"a\$b"
    assert plots["bytes"].set_yticks.call_args.args[1] == ["x" * 41 + "..."]
    assert plots["differences"].imshow.call_args.kwargs["vmax"] == 1.0, "no difference at all still has a scale"
    plots, _, _ = drawn([{**odd, "name": "y" * 44}], tmp_path, monkeypatch)
    assert plots["bytes"].set_yticks.call_args.args[1] == ["y" * 44]


def test_how_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures give the same bytes: no date, and names of parts from a fixed salt."""
    plots, pyplot, _ = drawn(RUNS[:1], tmp_path, monkeypatch)
    assert set(plots) == {"score-bytes", "score-tpot", "bytes"}
    options = {c.args[0].name: c.kwargs for c in plots["bytes"].figure.savefig.call_args_list}
    assert options == {"bytes.png": {"dpi": 200}, "bytes.svg": {"metadata": {"Date": None}}}
    wanted = {"font.size": 8, "svg.hashsalt": "kvbench", "svg.fonttype": "path"}
    assert pyplot.rc_context.call_args.args == (wanted,)
    assert sys.modules["matplotlib"].use.call_args.args == ("Agg",)  # type: ignore[attr-defined]
    assert {c.kwargs["constrained_layout"] for c in pyplot.subplots.call_args_list} == {True}
    assert plots["bytes"].figure.suptitle.call_args.kwargs == {"fontsize": 8}


@pytest.mark.parametrize(("dearest", "logarithmic"), [(6 * MIB, False), (6 * MIB + 1, True)])
def test_costs_beyond_a_ratio_of_six_have_a_logarithmic_scale(
    dearest: int, logarithmic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run("kivi", 1, score=[0.5, 0.1], kv=MIB), run("atom", 2, score=[0.6, 0.1], kv=dearest)]
    axes = drawn(runs, tmp_path, monkeypatch)[0]["score-bytes"]
    assert axes.set_xscale.called == logarithmic and not axes.set_yscale.called
    formatters = axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter
    assert [f.call_args.args[0](0.5, None) for f in formatters if f.called] == ["0.5"] * (2 * logarithmic)


def test_a_cost_of_zero_has_no_logarithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run("kivi", 1, score=[0.5, 0.1], kv=0), run("atom", 2, score=[0.6, 0.1], kv=9 * MIB)]
    axes = drawn(runs, tmp_path, monkeypatch)[0]["score-bytes"]
    assert not axes.set_xscale.called and [c.args[0] for c in axes.errorbar.call_args_list] == [0.0, 9.0]


def test_what_stands_around_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(RUNS, tmp_path, monkeypatch)[0]["score-bytes"]
    points = [dict(c.kwargs) for c in axes.errorbar.call_args_list]
    assert {(p["linestyle"], p["markersize"], p["capsize"]) for p in points} == {("", 5, 2)}
    front = {"where": "post", "color": "#444444", "linestyle": "--", "linewidth": 1, "label": "Pareto"}
    assert axes.step.call_args.kwargs == front and axes.size == (6.5, 4)
    assert axes.set.call_args.kwargs["xlabel"] == "KV bytes of a sequence (MiB)"
    assert axes.grid.call_args.kwargs == {"alpha": 0.3}
    legend = axes.figure.legend.call_args.kwargs
    assert legend == {"loc": "outside lower center", "ncols": 5, "frameon": False}


def test_divergences_stand_over_their_bytes_with_their_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a logarithmic scale, on which 0 has no place; a divergence is better below."""
    runs = [
        run("fp16", 0, kl=[0.0], kv=8 * MIB),
        run("kivi", 1, kl=[0.5, 1.0, 0.9, 0.4, 0.25, 1.5], kv=2 * MIB),
        run("atom", 2, kl=[0.25, 1.0, 0.9, 0.4], kv=4 * MIB),
        run("h2o", 3, kl=[0.75, 1.0, 0.9, 0.4, None, 0.8], kv=MIB),
    ]
    plots, _, _ = drawn(runs, tmp_path, monkeypatch)
    assert set(plots) == {"kl-bytes"}
    axes = plots["kl-bytes"]
    found = {c.kwargs["label"]: (*c.args, c.kwargs["yerr"]) for c in axes.errorbar.call_args_list}
    assert found == {"kivi": (2.0, 0.5, [[0.25], [1.0]]), "atom": (4.0, 0.25, None), "h2o": (1.0, 0.75, None)}
    assert axes.set_yscale.call_args.args == ("log",)
    assert axes.set.call_args.kwargs["ylabel"].startswith("KL divergence from fp16")
    assert axes.step.call_args.args == ((1.0, 2.0, 4.0), (0.75, 0.5, 0.25))


def test_every_figure_of_a_point_has_its_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds, tokens per second and MiB; a run that lacks a figure has no line."""
    whole = [2048, 1, "ok", 0.5, 0.25, 0.2, 0.3, 4.0, 3 * MIB, 5 * MIB]
    plots, _, _ = drawn([run("kivi", 1, points=[whole]), run("fp16", 2, points=[whole[:4]])], tmp_path, monkeypatch)
    found = {
        name: ([c.args for c in axes.plot.call_args_list], axes.set.call_args.kwargs["ylabel"])
        for name, axes in plots.items()
    }
    assert found == {
        "points-tpot": ([((2048,), (250.0,))], "time per output token (ms)"),
        "points-ttft": ([((2048,), (500.0,))] * 2, "time to the first token (ms)"),
        "points-rate": ([((2048,), (4.0,))], "tokens per second"),
        "points-bytes": ([((2048,), (3.0,))], "KV bytes of a sequence (MiB)"),
        "points-peak": ([((2048,), (5.0,))], "memory peak of decoding (MiB)"),
    }
    axes = plots["points-ttft"]
    assert axes.size == (6.5, 4) and axes.grid.call_args.kwargs == {"alpha": 0.3}
    assert axes.figure.legend.call_args.kwargs == {"loc": "outside lower center", "ncols": 3, "frameon": False}
    assert {c.kwargs["markersize"] for c in axes.plot.call_args_list} == {5}


def test_ticks_of_points_are_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(POINTS, tmp_path, monkeypatch)[0]["points-tpot"]
    for setter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        assert [setter.call_args.args[0](y, 0) for y in (20.0, 0.5)] == ["20", "0.5"]
    assert axes.tick_params.call_args.kwargs == {"axis": "x", "which": "minor", "size": 0}
    assert axes.set_xscale.call_args.args == ("log",)


def test_names_in_a_legend_of_points_have_at_most_30_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [{**POINTS[0], "name": "n" * length} for length in (30, 31)]
    axes = drawn(runs, tmp_path, monkeypatch)[0]["points-tpot"]
    assert [c.kwargs["label"] for c in axes.plot.call_args_list] == ["n" * 30, "n" * 27 + "..."]


def test_what_stands_around_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell darker than 0.7 of the largest difference has white figures; task names are cut to 24 characters."""
    tasks = [["a", 0.8, 0.1, 5, -1.0], ["b", 0.7, 0.1, 5, 0.75]]
    runs = [run("kivi", 1, score=[0.5], kv=1, tasks=tasks), run("atom", 2, score=[0.5], kv=1)]
    monkeypatch.setitem(NAMES, "a", "t" * 25)
    monkeypatch.setitem(NAMES, "b", "u" * 24)
    axes = drawn(runs, tmp_path, monkeypatch)[0]["differences"]
    cells = axes.annotate.call_args_list
    assert [c.kwargs["color"] for c in cells] == ["white", "white"]
    assert {(c.kwargs["ha"], c.kwargs["va"], c.kwargs["fontsize"]) for c in cells} == {("center", "center", 6)}
    assert axes.set_xticks.call_args.args == (range(2), ["t" * 21 + "...", "u" * 24])
    assert axes.set_xticks.call_args.kwargs == {"rotation": 30, "ha": "right"}
    options = axes.imshow.call_args.kwargs
    assert (options["aspect"], options["interpolation"]) == ("auto", "nearest")
    colorbar = axes.figure.colorbar.call_args
    assert colorbar.args == (axes.imshow.return_value,)
    assert colorbar.kwargs == {"ax": axes, "label": "method minus fp16"}
    assert axes.set_yticks.call_args.args == (range(1), ["kivi (1)"]), "a run without differences has no line"


def test_what_stands_around_bars_and_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots, _, _ = drawn(
        [{**run, "ttfts": run["tpots"]} if "tpots" in run else run for run in RUNS], tmp_path, monkeypatch
    )
    bars, boxes = plots["bytes"], plots["tpot"]
    assert bars.size == boxes.size == (6.5, 1.4)
    assert [c.kwargs["color"] for c in bars.barh.call_args_list] == ["#0072B2", "#56B4E9", "#E69F00", "#7F7F7F"]
    assert {(c.kwargs["edgecolor"], c.kwargs["linewidth"]) for c in bars.barh.call_args_list} == {("white", 0.4)}
    assert [c.args[0] for c in bars.barh.call_args_list] == [range(2)] * 4
    assert bars.set.call_args.kwargs == {"xlabel": "KV bytes of a sequence (MiB)"}
    assert bars.figure.legend.call_args.kwargs == {"loc": "outside lower center", "ncols": 4, "frameon": False}
    assert bars.grid.call_args.kwargs == boxes.grid.call_args.kwargs == {"axis": "x", "alpha": 0.3}
    assert boxes.bxp.call_args.kwargs == {
        "orientation": "horizontal",
        "showfliers": False,
        "patch_artist": True,
        "medianprops": {"color": "black"},
    }
    assert boxes.set.call_args.kwargs == {"xlabel": "time per output token (ms)"}
    assert plots["ttft"].set.call_args.kwargs == {"xlabel": "time to the first token (ms)"}


def test_boxes_have_the_colour_of_their_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MagicMock] = []
    known = MagicMock()

    def patches(boxes: Any, **options: Any) -> dict[str, Any]:
        made.extend(MagicMock() for _ in boxes)
        return {"boxes": made}

    axes = MagicMock()
    axes.bxp.side_effect = patches
    known.subplots.return_value = MagicMock(), axes
    module = ModuleType("matplotlib")
    module.use, module.pyplot = MagicMock(), known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", module)
    runs = [run(label, n, tpots=[0.1, 0.2, 0.3, 0.4, 0.5, 9]) for n, label in enumerate(("kivi", "fp16"))]
    write_plots({"runs": runs, "groups": {}, "tasks": {}}, tmp_path)
    wanted = [{"facecolor": colour, "alpha": 0.6} for colour in ("#E69F00", "#000000")]
    assert [patch.set.call_args.kwargs for patch in made] == wanted


def test_a_plot_with_a_line_per_run_has_at_most_40(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with most bytes and the fastest ones; of differences and points, the first ones."""
    times, points = [0.1, 0.2, 0.3, 0.4, 0.5, 9], [[4096, 1, 0, 0.3, 0.02]]
    runs = [
        run("kivi", n, kv=n * MIB, bill=[n * MIB, 0, 0, 0], tasks=[["a", 0, 0, 5, 0.5]], points=points)
        | {"tpots": [time + n for time in times]}
        for n in range(41)
    ]
    plots, _, _ = drawn(runs, tmp_path, monkeypatch)
    shown = {name: plots[name].set_yticks.call_args.args[1] for name in ("bytes", "differences", "tpot")}
    assert shown["bytes"] == [f"kivi ({n})" for n in range(1, 41)]
    assert shown["differences"] == [f"kivi ({n})" for n in range(40)]
    assert shown["tpot"] == [f"kivi ({n})" for n in range(39, -1, -1)]
    assert [c.kwargs["label"] for c in plots["points-tpot"].plot.call_args_list] == shown["differences"]


def test_up_to_56_methods_differ_in_colour_or_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run(f"m{n:02}", n, score=[0.5], kv=MIB) for n in range(55)] + [run("fp16", 99, score=[1.0], kv=MIB)]
    calls = drawn(runs, tmp_path, monkeypatch)[0]["score-bytes"].errorbar.call_args_list
    styles = {c.kwargs["label"]: (c.kwargs["color"], c.kwargs["marker"]) for c in calls}
    assert len(set(styles.values())) == len(styles) == 56 and styles["fp16"] == ("#000000", "o")


def test_a_run_without_a_cost_or_a_score_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run("kivi", 1, score=[0.5], kv=MIB), run("atom", 2, score=[0.5]), run("h2o", 3, kv=MIB)]
    axes = drawn(runs, tmp_path, monkeypatch)[0]["score-bytes"]
    assert [c.kwargs["label"] for c in axes.errorbar.call_args_list] == ["kivi"]


def test_without_a_run_that_ended_there_is_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {**RUNS[1], **POINTS[0], "kl": [0.5], "status": "error"}
    plots, _, title = drawn([ended], tmp_path, monkeypatch)
    assert (plots, title) == ({}, "")
