"""Speed-ups at forced acceptance: the arithmetic of the grid, the tables, and a run on a CPU."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.bench import __main__ as command
from kvbench.bench import speculation_bench
from kvbench.bench.speculation_bench import drafts, speculation_point
from kvbench.bench.speculation_grid import (
    block_times,
    fastest_gamma,
    full_rounds,
    grid_cell,
    round_parts,
    speculation_tables,
    speed_grid,
    time_at,
)
from kvbench.decoding.round_times import Round
from kvbench.profiling.intensity import speculative_speed_up
from tests import zoo

SCAN = [
    {"gamma": 2, "draft_ms": 3.0, "verify_ms": 6.0, "sampling_ms": 0.5, "flush_ms": 0.1},
    {"gamma": 6, "draft_ms": 3.2, "verify_ms": 8.0, "sampling_ms": 0.5, "flush_ms": 0.1},
]


def turn(seconds: float, emitted: list[int], gamma: int = 4) -> Round:
    """Return a round whose drafts all could be accepted, and whose parts take half, a third and a tenth of it."""
    limits, accepted = [gamma] * len(emitted), [count - 1 for count in emitted]
    return Round(seconds, [9] * len(emitted), limits, accepted, emitted, seconds / 2, seconds / 3, seconds / 10)


def test_rounds_at_the_beginning_and_at_the_end_of_an_answer_do_not_count() -> None:
    rounds = [turn(float(n), [3, 3]) for n in range(6)]
    rounds.append(replace(rounds[0], drafted=[4, 2]))
    assert [one.seconds for one in full_rounds(rounds, 4)] == [2.0, 3.0, 4.0, 5.0]
    assert full_rounds(rounds, 3) == []


def test_blocks_are_times_per_token_and_row() -> None:
    """Two rows, 3 tokens a round on average: a block of 5 takes two rounds; the last round is left out."""
    rounds = [turn(seconds, [2, 4]) for seconds in (1.0, 2.0, 3.0, 6.0, 99.0)]
    assert block_times(rounds, 5) == [pytest.approx(1e3 * 3 / 6), pytest.approx(1e3 * 9 / 6)]


def test_parts_are_medians_and_flushes_a_mean_per_token() -> None:
    computed = round_parts([turn(seconds, [2, 4]) for seconds in (1.0, 3.0, 30.0)], 4)
    assert (computed["gamma"], computed["rounds"], computed["tokens"]) == (4, 3, 3.0)
    assert computed["round_ms"] == 3000.0
    assert computed["draft_ms"] == pytest.approx(1e3 * 1.5 / 4)
    assert computed["verify_ms"] == pytest.approx(1000.0)
    assert computed["sampling_ms"] == pytest.approx(3e3 * (1 - 1 / 2 - 1 / 3 - 1 / 10))
    assert computed["flush_ms"] == pytest.approx(1e3 * 3.4 / 9)
    untimed = round_parts([Round(1.0, [9], [4], [1], [2])] * 3, 4)
    assert "draft_ms" not in untimed and grid_cell([untimed], 0.9, 4) is None


@pytest.mark.parametrize(("gamma", "expected"), [(1, 6.0), (2, 6.0), (3, 6.5), (6, 8.0), (8, 8.0)])
def test_times_between_measured_gammas(gamma: int, expected: float) -> None:
    assert time_at(SCAN, gamma, "verify_ms") == expected


def test_a_cell_is_the_time_of_a_round_over_its_expected_tokens() -> None:
    computed = grid_cell(SCAN, 0.9, 2)
    assert computed is not None and computed["times"] == "measured"
    assert computed["tokens"] == pytest.approx(1 + 0.9 + 0.81)
    assert computed["ms"] == pytest.approx(12.5 / 2.71 + 0.1)
    between_both = grid_cell(SCAN, 0.9, 4)
    assert between_both is not None and between_both["times"] == "interpolated"
    assert between_both["ms"] == pytest.approx((4 * 3.1 + 7.0 + 0.5) / between_both["tokens"] + 0.1)


def test_flushes_are_spread_over_the_tokens_of_all_gammas() -> None:
    """A block of one gamma may have no flush, and another two."""
    counts = ({"rounds": 10, "tokens": 3.0, "flush_ms": 0.0}, {"rounds": 20, "tokens": 4.5, "flush_ms": 0.4})
    scan = [{**entry, **more} for entry, more in zip(SCAN, counts, strict=True)]
    computed = grid_cell(scan, 1.0, 2)
    assert computed is not None and computed["ms"] == pytest.approx(12.5 / 3 + 0.4 * 90 / 120)


def test_the_grid_agrees_with_the_formula_of_the_analysis() -> None:
    scan = [{"gamma": g, "draft_ms": 3.0, "verify_ms": 6.4, "sampling_ms": 0.0, "flush_ms": 0.0} for g in range(1, 9)]
    cells = speed_grid(scan, (0.8, 0.9), range(1, 9))
    assert len(cells) == 16
    for one in cells:
        assert 7.9 / one["ms"] == pytest.approx(speculative_speed_up(one["acceptance"], one["gamma"], 7.9, 3.0, 6.4))
    assert fastest_gamma(cells, 0.9) == max(
        range(1, 9), key=lambda gamma: speculative_speed_up(0.9, gamma, 7.9, 3.0, 6.4)
    )
    assert fastest_gamma(cells, 0.5) is None


def test_points_on_the_command_line() -> None:
    assert speculation_point("llama2-7b:4:8k") == ("llama2-7b", 4, 8192)
    for wrong in ("llama2-7b", "llama2-7b:0:8k", ":1:8k", "llama2-7b:1:many"):
        with pytest.raises(ValueError):
            speculation_point(wrong)
    with pytest.raises(ArgumentTypeError, match="at most 8"):
        drafts("9")


def test_a_run_measures_every_case_and_says_that_the_text_is_meaningless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[str] = []

    def load(config: Any, runtime: Any) -> Any:
        loads.append(config.name)
        assert runtime.compile
        return SimpleNamespace(model=zoo.restless())

    monkeypatch.setattr(speculation_bench, "load_joined", load)
    monkeypatch.setitem(speculation_bench.CASES, "quantspec", ("quantspec", 0))  # 4-bit weights are slow on a CPU
    arguments = ["--cases", "plain", "quantspec", "snapkv", "--points", "tiny:1:280", "tiny:2:40", "--device", "cpu"]
    arguments += ["--gammas", "1", "3", "--side-gammas", "2", "--tokens", "4", "--blocks", "2", "--dtype", "float32"]
    arguments += ["--acceptances", "0.5", "--measure-all", "--out", str(tmp_path)]
    arguments += ["--side-points", "tiny:1:280"]
    assert command.main(["speculation", *arguments]) == 0
    content = json.loads((tmp_path / "speculation.json").read_text())
    assert loads == ["tiny"] and "meaningless" in content["what"] and content["acceptances"] == [0.5, 0.9]
    rows = content["rows"]
    assert [(row["case"], row["batch"]) for row in rows] == [
        ("plain", 1), ("quantspec", 1), ("plain", 2), ("quantspec", 2), ("snapkv", 1)
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok" and row["stepping"].startswith("eager")
        if row["case"] == "plain":
            assert len(row["blocks_ms"]) == 2 and row["ms"] > 0
            continue
        gammas = [1, 3] if row["case"] == "quantspec" else [2]
        assert ("auto" in row) == (row["case"] == "quantspec")
        if "auto" in row:
            assert row["auto"]["ms"] > 0 and set(row["auto"]["gammas"]) <= set("12345678")
        assert [entry["gamma"] for entry in row["gammas"]] == gammas
        assert all(entry["verify_ms"] > 0 and entry["draft_ms"] > 0 for entry in row["gammas"])
        acceptances = [0.9, 0.5] if row["case"] == "quantspec" else [0.9]
        assert [one["acceptance"] for one in row["measured"]] == acceptances
        assert all(len(one["blocks_ms"]) >= 2 for one in row["measured"])
        places = {(one["acceptance"], one["gamma"]) for one in row["grid"]}
        assert places == {(a, g) for a in (0.5, 0.9) for g in range(1, 9)}
    shown = capsys.readouterr().out
    assert "acceptance forced to 0.9 (the text is meaningless)" in shown
    assert "speed-up by gamma, computed" in shown


def test_tables_of_unfinished_cases_have_no_numbers() -> None:
    place = {"model": "m", "batch": 1, "context": 64}
    plain, failed = {**place, "case": "plain", "status": "ok", "ms": 8.0}, {**place, "case": "kv", "status": "oom"}
    scan = speed_grid(SCAN, (0.9,), (2, 4))
    whole = {**place, "case": "quantspec", "status": "ok", "grid": scan, "stepping": "graph", "peak": 2**30}
    whole["measured"] = [{"acceptance": 0.9, "gamma": 2, "ms": 4.0, "draft_ms": 3.0, "verify_ms": 6.0}]
    shown = speculation_tables([plain, whole, {**failed, "message": "no room"}], 0.9)
    assert "no room" in shown
    line = next(line for line in shown.splitlines() if line.startswith("m ") and "quantspec" in line)
    assert line.split()[4:8] == ["2", "4.00", "2.00", "1.70"]
    assert "2.00 (gamma 2)" in shown
