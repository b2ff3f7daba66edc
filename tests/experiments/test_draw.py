"""Tables as text, and pictures where matplotlib is missing."""

import builtins
from dataclasses import replace

import pytest

from experiments.data import Plan
from experiments.draw.figure import NO_MATPLOTLIB, draw_item, with_short_coordinates
from experiments.draw.table import (
    amount,
    because,
    claims,
    decimal_text,
    escaped,
    item_markdown,
    latex,
    to_csv,
    with_reach,
)
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.item import Column, Grid, Row
from experiments.write import write_item

ITEM = Grid(
    id="cocktail/figure9",
    number="Figure 9",
    title="A sweep",
    caption="A caption.",
    rows=(Row(name="a 1", setting="fp16", series="a", x=1.0), Row(name="a 2", setting="kivi", series="a", x=2.0)),
    columns=(Column(name="score", data="mini"),),
    draw="sweep",
)
VERDICTS = [
    Verdict(
        claim="more", model="tiny", paper=0.5, ours=2.0, stderr=0.5, n=10, low=0.0, high=float("inf"), unit="points",
        verdict="holds", least=0.87, most=3.13,
    )
]  # fmt: skip


def folded(marks=()):
    cells = [
        Cell(
            model="tiny",
            row="a 1",
            column="score",
            paper=50.0,
            ours=48.0,
            stderr=1.5,
            n=10,
            runs=("one",),
            low=44.5,
            high=51.0,
        ),
        Cell(model="tiny", row="a 2", column="score", reason="no weights\n  hint: get them"),
    ]
    rows = ["a 1", "a 2"]
    headings = [Heading(name="score")]
    return Folded(headings=headings, rows=rows, models=["tiny"], cells=cells, verdicts=VERDICTS, marks=marks)


def test_paper_ours_and_difference():
    text = item_markdown(ITEM, folded())
    assert "| | | score (n = 10) |" in text
    for line in ("| a 1 | paper | 50.00 |", "|  | ours | 48.00 ±3.50 |", "|  | ours - paper | -2.00 |"):
        assert line in text
    assert "Empty (a 2): no weights" in text and "hint" not in text
    assert "| more | tiny | +0.50 | +2.00 points [+0.87, +3.13] | 10 | above 0 points | holds |" in text


def test_a_long_reason_ends_with_a_whole_word():
    reason = "the weights are " + "far away " * 40
    cells = [Cell(model="tiny", row="a 1", column="score", reason=text) for text in (reason, reason[:240])]
    lines = item_markdown(ITEM, replace(folded(), cells=cells)).splitlines()
    first, second = (line.removeprefix("Empty (a 1): ") for line in lines if line.startswith("Empty"))
    assert second == reason[:240].strip()
    assert len(first) <= 240 and first.endswith(" ...") and reason.startswith(first.removesuffix("..."))


def test_generated_records_show_no_difference():
    text = item_markdown(ITEM, folded(marks=["format only"]))
    assert "**format only**" in text and "paper |" not in text and "holds" not in text
    assert "50.00" not in latex(ITEM, folded(marks=["format only"]))


def test_csv_has_a_line_per_cell():
    head, first, second = to_csv(folded()).splitlines()
    assert head.split(",")[:6] == ["model", "row", "column", "paper", "ours", "difference"]
    assert first == "tiny,a 1,score,50.0,48.0,-2.0,1.5,10,,,44.5,51.0,,,one,"
    assert second.endswith(",no weights")


def test_latex():
    text = latex(ITEM, folded())
    assert r"a 1 & 48.00\,$\pm$\,3.50 \\" in text and r"\quad paper & 50.00 \\" in text and r"a 2 & -- \\" in text
    assert escaped("50% of a_b & γ") == r"50\% of a\_b \& $\gamma$"


def test_numbers():
    assert (decimal_text(None), decimal_text(1.005, 1), decimal_text(2.0, 2, sign=True)) == ("", "1.0", "+2.00")
    assert (with_reach(1.0, None, None), with_reach(None, 0.0, 1.0)) == ("1.00", "")
    assert with_reach(1.0, 0.5, 1.0) == "1.00 ±0.50" == with_reach(1.0, 0.75, 1.5)
    assert claims(VERDICTS)[0].startswith("| claim |")


def test_what_stands_behind_a_verdict():
    one = VERDICTS[0]
    assert amount(replace(one, unit="factor", least=None, label="one measurement")) == "factor 2.00 (one measurement)"
    assert amount(replace(one, ours=None)) == "-" and because(one) == ""
    assert because(replace(one, needed=1234)) == " (about 1,300 samples would)"
    assert because(replace(one, needed=2_000_001)) == " (more than a million samples would)"
    assert because(replace(one, verdict="not comparable", reason="eager steps")) == ": eager steps"


def test_without_matplotlib_tables_are_written_all_the_same(tmp_path, monkeypatch):
    imported = builtins.__import__

    def missing(name, *rest):
        if name == "matplotlib":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    where, reason = write_item(ITEM, folded(), Plan(models=("tiny",), data="mini", out=tmp_path))
    folder = where.path
    assert reason == NO_MATPLOTLIB and (folder / "table.md").exists() and not (folder / "figure.png").exists()
    assert folder == tmp_path / "cocktail" / "figure9" / "tiny-mini"


def test_a_sweep_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_item(ITEM, folded(), tmp_path) == ""
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_paths_have_hundredths_of_a_point_and_all_else_its_digits() -> None:
    whole = '<path id="d" d="M 43.040006 -93.996 L 12 0.5 L 1e-05 2" x="1.23456" transform="scale(0.015625)"/>'
    assert (
        with_short_coordinates(whole)
        == '<path id="d" d="M 43.04 -94.00 L 12 0.5 L 1e-05 2" x="1.23" transform="scale(0.015625)"/>'
    )
