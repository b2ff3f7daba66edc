"""The leaderboard's lines: what each entry is, and what stays out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbench.page import papers


def entry(**changes: Any) -> dict[str, Any]:
    mean = {"score": 0.75, "low": 0.5, "high": 0.85, "n": 40}
    pair = {"diff": -0.125, "stderr": 0.05, "low": -0.25, "high": 0.125}
    content = {
        "name": "kivi 2",
        "family": "kivi",
        "command": "method=kivi",
        "mean": {**mean, "vs_fp16": pair},
        "tasks": {"a@2048": {}, "b@2048": {}, "a@4096": {}, "b@4096": {}},
        "kv_bytes": {"used": 1000.6, "fp16_equivalent": 4000.4},
        "devices": ["one card", "another"],
    }
    return content | changes


@pytest.fixture
def shown(tmp_path):
    """Function that returns the lines of a leaderboard of some entries."""

    def lines(*entries: dict[str, Any]) -> list[list[Any]]:
        (tmp_path / "mini").mkdir(exist_ok=True)
        (tmp_path / "mini" / "scores.json").write_text(json.dumps(entries))
        return papers.board(tmp_path)

    return lines


def test_a_line_has_the_scores_with_their_reach_and_the_command(shown):
    """The reach is to the farther end: 0.75 - 0.5 below, and 0.125 + 0.125 above."""
    command = (
        "python -m kvbench method=kivi dataset=mini dataset.tasks=[a,b] dataset.lengths=[2048,4096] dataset.limit=10"
    )
    line = ["kivi 2", "kivi", command, 0.75, 0.25, 40, -0.125, 0.25, 1001, 4000, "one card, another"]
    assert shown(entry()) == [line]


def test_a_setting_without_a_difference_from_fp16_has_a_line(shown):
    mean = {"score": 0.75, "low": 0.5, "high": 0.85, "n": 40}
    (line,) = shown(entry(mean=mean, devices=None))
    assert line[3:] == [0.75, 0.25, 40, None, None, 1001, 4000, ""]


def test_texts_are_cut_and_a_long_command_is_left_out(shown):
    (line,) = shown(entry(name="n" * 81, family="f" * 41, devices=["d" * 81], command="x" * 204))
    assert [line[0], line[1], line[10]] == [f"{c * n} ... {c * n}" for c, n in (("n", 37), ("f", 17), ("d", 37))]
    whole = " dataset=mini dataset.tasks=[a,b] dataset.lengths=[2048,4096] dataset.limit=10"
    room = 300 - len("python -m kvbench ") - len(whole)
    (line,), (longer,) = shown(entry(command="x" * room)), shown(entry(command="x" * (room + 1)))
    assert len(line[2]) == 300 and line[2].endswith(whole) and longer[2] == ""
    (line,) = shown(entry(name="n" * 80, family="f" * 40, devices=["d" * 80]))
    assert [line[0], line[1], line[10]] == ["n" * 80, "f" * 40, "d" * 80]


def test_at_most_60_settings_are_shown_the_first_ones(shown):
    lines = shown(*(entry(name=str(number)) for number in range(61)))
    assert [line[0] for line in lines] == [str(number) for number in range(60)]
