"""What the plots of the page show, told by the calls that a stand-in for matplotlib receives."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvbench.page.figures import figures

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
    title, files = figures({"runs": runs, "groups": {"g": "mini", "p": "times"}, "tasks": NAMES}, folder)
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
