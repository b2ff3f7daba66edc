"""The one printer: plain values, widths, and texts that wrap or are split into several tables."""

from __future__ import annotations

import os

import pytest

from kvbench.util import table
from kvbench.util.table import Cell

HEAD = ("model", "tokens", "us", "note")
ROWS = [("7b", 4096, 12.345, None), ("70b", 128, 0.00123, "[bold]no kernel[/bold]")]


def test_plain_values_are_aligned_and_brackets_are_text():
    lines = table.render_table(HEAD, ROWS, width=80).splitlines()
    assert lines[0].split() == list(HEAD)
    assert set(lines[1].strip()) == {"─"}
    assert lines[2:] == ["7b       4096     12.3  -", "70b       128  1.2e-03  [bold]no kernel[/bold]"]
    assert not any(line.endswith(" ") for line in lines)


def test_a_table_without_lines_is_its_header():
    assert table.render_table(("a", "b"), []).splitlines()[0] == "a  b"


def test_brackets_in_a_heading_are_text():
    grid = table.Grid(["", "layers=[0-1:fp16]"], [[Cell("a"), Cell("1")]])
    assert "layers=[0-1:fp16]" in table.render_text(grid.fitted(80), width=80)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_wide_table_repeats_the_columns_that_name_its_lines(width):
    head = ["model", "batch", *(f"figure {i}" for i in range(30))]
    rows = [[name, batch, *(1000.0 + i for i in range(30))] for name in ("7b", "8b") for batch in (1, 8)]
    lines = table.render_table(head, rows, names=2, width=width).splitlines()
    assert max(map(len, lines)) <= width
    headings = [line for line in lines if line.startswith("model  batch")]
    assert len(headings) > 1
    assert sum(line.count("figure") for line in headings) == 30
    assert len([line for line in lines if line.startswith("7b")]) == 2 * len(headings)


def test_columns_are_divided_among_as_few_tables_as_possible():
    assert table.column_blocks([4, 10, 10, 10, 10], 28) == [[0, 1, 2], [0, 3, 4]]  # 4 + 2 * (2 + 10) = 28
    assert table.column_blocks([4, 10, 10, 10, 10], 27) == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert sorted(map(len, table.column_blocks([4, 10, 10, 10], 28))) == [2, 3]
    assert table.column_blocks([4, 5, 5, 5, 5], 25) == [[0, 1, 2], [0, 3, 4]]  # not three and a single one
    assert table.column_blocks([4, 5, 5, 5], 25) == [[0, 1, 2, 3]]
    assert table.column_blocks([2, 20, 3, 3, 3], 30) == [
        [0, 1, 2],
        [0, 3, 4],
    ]  # though one wide column would be more even
    assert table.column_blocks([2, 3, 3, 3, 3, 10], 25) == [
        [0, 1, 2, 3],
        [0, 4, 5],
    ]  # widths of 17 and 19, not 12 and 24
    assert table.column_blocks([4, 50, 3], 20) == [[0, 1], [0, 2]]  # a column that is too wide has its own table
    assert table.column_blocks([4, 3, 10, 10], 32, names=2) == [[0, 1, 2], [0, 1, 3]]
    assert table.column_blocks([4, 3, 10, 10], 33, names=2) == [[0, 1, 2, 3]]
    assert table.column_blocks([4], 20) == [[0]]


def test_a_table_is_transposed_or_narrowed_before_it_is_split():
    body = [[Cell("fp16", "x"), *(Cell("1" * 18) for _ in range(5))]]
    grid = table.Grid(["setting", *(f"c{i}" for i in range(5))], body, across=True)
    lines = table.render_text(grid.fitted(80), width=80).splitlines()
    assert lines[0].split() == ["fp16", "x"]
    assert [line.split() for line in lines[2:]] == [[f"c{i}", "1" * 18] for i in range(5)]
    narrow = table.Grid(["a", "b"], [[Cell("x" * 30), Cell("1" * 49)]])  # 80 wide with a gap of 1
    assert table.render_text(narrow.fitted(80), width=80).splitlines()[2] == f"{'x' * 30} {'1' * 49}"
    assert len(table.render_text(narrow.fitted(79), width=79).splitlines()) > 2
    assert table.Grid(["a" * 40, "b" * 40], [], wraps=(0,)).widths == [34, 40]
    assert table.Grid(["a", "b"], [[Cell("x"), Cell("1", "22")]]).widths == [1, 2]


def test_a_long_reason_takes_several_lines_and_loses_nothing():
    reason = "RuntimeError: " + "a kernel of that shape does not exist " * 4
    lines = table.render_table(("setting", "us"), [["fp16", reason]], width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(line.removeprefix("fp16") for line in lines[2:]).split()) == reason.strip()


def test_no_terminal_is_a_hundred_columns_of_plain_text(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    assert table.fit() == 100
    assert (table.fit(20), table.fit(120), table.fit(500)) == (80, 120, 160)
    assert "\x1b" not in table.render_table(HEAD, ROWS)


def test_colours_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    grid = table.Grid(("a",), [[Cell("1", "below")]])
    assert "\x1b" in table.render_text(grid.fitted(80), color=True)
    assert "\x1b" not in table.render_text(grid.fitted(80), color=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        ("text", "text"),
        (3, "3"),
        (0.0, "0.00"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (99.95, "100"),
        (99.94, "99.9"),
        (9.995, "10.0"),
        (9.994, "9.99"),
        (0.01, "0.01"),
        (0.00994, "9.9e-03"),
        (-123.4, "-123"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
    ],
)
def test_values_have_about_three_digits(value, expected):
    assert table.format_value(value) == expected
