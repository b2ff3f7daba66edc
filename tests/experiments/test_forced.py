"""Speeds at a forced acceptance, from made-up files of ``bench speculation`` (the numbers are no measurements)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import speculation
from experiments.data import Plan
from experiments.fold import forced
from experiments.fold.figures import FIGURES
from experiments.fold.sources import Source, runs_of, sources_of
from experiments.item import Column, Computed, Grid
from experiments.quantspec import figure1, figure5, table4, table7

COLUMN = Column(name="32k", data="efficiency", figure="forced_speedup", prompt=32768, batch=1)


def row(case: str, ms: float, context: int = 32768, **more: Any) -> dict[str, Any]:
    """Return a row as the command writes it; speculation was measured at two acceptances."""
    place = {"model": "llama2-7b", "batch": 1, "context": context, "case": case, "status": "ok", "peak": 2**34}
    if case == "plain":
        return {**place, "ms": ms, "stepping": "graph, compiled", **more}
    measured = [{"acceptance": 0.8, "gamma": 2, "ms": 2 * ms}, {"acceptance": 0.9, "gamma": 5, "ms": ms}]
    return {**place, "measured": measured, "stepping": "graph, compiled", **more}


def write(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    content = {"device": "made-up GPU", "at": 0.9, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the results, with two contexts."""
    for name, factor, context in (("short", 1.0, 32768), ("long", 2.0, 131072)):
        times = {"plain": 8.0, "quantspec": 4.0, "kv": 6.0, "weights": 5.0, "streamingllm": 6.5, "snapkv": 7.0}
        if name == "long":
            times |= {"kv": 4.5, "quantspec": 3.5}
        write(tmp_path, name, *(row(case, factor * ms, context) for case, ms in times.items()))
    monkeypatch.setattr(forced, "FOLDER", tmp_path)
    return tmp_path


def test_the_case_of_each_setting_of_the_tables() -> None:
    settings = {one.name: one.setting for one in table4.ITEM.rows}
    cases = {name: forced.case_of(setting) for name, setting in settings.items() if setting}
    assert cases == {
        "StreamingLLM": "streamingllm",
        "SnapKV": "snapkv",
        "QuantSpec": "quantspec",
        "AR (fp16)": "plain",
    }


def test_a_point_is_that_of_the_acceptance_of_the_file(folder: Path) -> None:
    """At batch 1 only, and for models of the same dimensions."""
    source = forced.forced_source("longchat-7b", "quantspec", COLUMN)
    assert source.runs == ("short.json",) and source.note == "made-up GPU, graph, compiled"
    rows = list(source.rows.values())
    figures = {name: FIGURES[name](rows) for name in forced.FIGURES}
    assert {name: figure and figure.value for name, figure in figures.items()} == {
        "forced_speedup": 2.0,
        "forced_rate": pytest.approx(250.0),
        "forced_peak": float(2**34),
    }
    assert forced.forced_source("llama3.1-8b", "quantspec", COLUMN).reason == f"not measured: {forced.COMMAND}"
    (cache_alone,) = forced.forced_source("llama2-7b", "kv", COLUMN).rows.values()
    assert cache_alone["measured"]["point"]["forced"]["best"] == "acceptance 0.9, gamma 5"


def test_a_case_that_was_not_finished_does_not_hide_another_file(tmp_path: Path) -> None:
    write(tmp_path, "a", row("kv", 4.0), row("plain", 5.0))
    write(tmp_path, "b", row("kv", 9.0, status="failed", measured=[]), {"setting": "fp16", "prompt": 3})
    write(tmp_path, "c", row("kv", 3.0))  # without plain decoding in the same run
    assert forced.forced_source("llama2-7b", "kv", COLUMN, tmp_path).runs == ("a.json",)
    (tmp_path / "c.json").unlink()
    (tmp_path / "a.json").rename(tmp_path / "d.json")
    forced.forced_speeds.cache_clear()
    assert forced.forced_source("llama2-7b", "kv", COLUMN, tmp_path).runs == ("d.json",)
    (tmp_path / "d.json").rename(tmp_path / "a.json")
    (tmp_path / "a.json").unlink()
    forced.forced_speeds.cache_clear()
    assert forced.forced_source("llama2-7b", "kv", COLUMN, tmp_path).reason == "failed on made-up GPU"


@pytest.mark.parametrize(
    "item",
    [*(pytest.param(item, marks=pytest.mark.slow) for item in (table4.ITEM, table7.ITEM)), figure1.ITEM],
    ids=lambda item: item.id,
)
def test_tables_take_forced_speeds_from_the_files(item: Grid, folder: Path, tmp_path: Path) -> None:
    plan = Plan(runs=tmp_path / "runs")
    names = {column.name for column in item.columns if column.figure in forced.FIGURES}
    assert names and all("forced" in column.figure for column in item.columns if column.name in names)
    runs = {place: run for place, run in runs_of(item, plan).items() if place[2] in names}
    assert runs and all(isinstance(run, Source) for run in runs.values())  # nothing to run
    sources = sources_of(item, plan, {})
    filled = {place for place in runs if sources[place].rows}
    if item is table7.ITEM:  # the files are of another shape
        assert not filled
    else:
        assert {place[1] for place in filled} == {"StreamingLLM", "SnapKV", "QuantSpec", "AR (fp16)"}
    named = sources_of(item, Plan(runs=tmp_path / "runs", models=(item.models[0].preset,)), {})
    assert not any(named[place].rows for place in runs if place in named)


def test_figure_5_has_measured_and_predicted_speed_ups(folder: Path) -> None:
    item = figure5.ITEM
    assert isinstance(item, Computed)
    folded = forced.shares_of_speed(item, Plan())
    cells = {(cell.row, cell.column): cell for cell in folded.cells}
    assert cells["both", "32k"].ours == pytest.approx(2.0)
    assert cells["both", "32k"].note == "acceptance 0.9, gamma 5"
    assert cells["KV cache only", "128k"].ours == pytest.approx(16 / 9)
    assert cells["weights only", "1k"].ours is None and "not measured" in cells["weights only", "1k"].reason
    assert cells["both, predicted", "1k"].ours is not None
    verdicts = {verdict.claim: (verdict.verdict, verdict.ours) for verdict in folded.verdicts}
    assert verdicts["at 32k weights bring more than the cache"] == ("undecided", pytest.approx(8 / 5 - 8 / 6))
    assert verdicts["at 128k the cache brings more than weights"] == ("undecided", pytest.approx(16 / 9 - 8 / 5))
    assert {verdict.label for verdict in folded.verdicts} == {"one measurement"}


def test_figure_5_without_files_is_predicted(tmp_path: Path) -> None:
    folded = forced.shares_of_speed(figure5.ITEM, Plan(), tmp_path)
    assert all(cell.ours is None for cell in folded.cells if "predicted" not in cell.row)
    assert [verdict.verdict for verdict in folded.verdicts] == ["holds"] * 3
    assert {verdict.label for verdict in folded.verdicts} == {"computed"}


def test_tables_of_the_documents(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.glob("*.json"):  # with the times of rounds
        content = json.loads(path.read_text())
        for one in content["rows"]:
            if one["case"] == "quantspec":
                one["grid"] = [
                    {"acceptance": a, "gamma": g, "ms": ms, "tokens": 3.0, "times": times}
                    for a, g, ms, times in ((0.8, 2, 8.0, "measured"), (0.9, 5, 4.0, "interpolated"))
                    for g in (2, 5)
                ]
                one["auto"] = {"ms": 5.0, "gammas": {"4": 9}}
                one["gammas"] = [{"gamma": 1, "draft_ms": 3.1, "verify_ms": 6.5, "sampling_ms": 0.16}]
                one["measured"][1] |= {"draft_ms": 3.1, "verify_ms": 6.5, "sampling_ms": 0.15, "flush_ms": 0.01}
        path.write_text(json.dumps(content))
    results = speculation.Results(folder)
    assert [speculation.name(key) for key in results.points()] == ["7B, 32k", "7B, 128k"]
    table = speculation.speeds(results)
    assert table[2] == "| 7B, 32k | 8.00 | 4.00 | 5 | 2.00 | 1.33 | 1.60 | 1.23 | 1.14 | 0.22 |"
    shown = speculation.speculation_tables(results)
    assert "| 7B, 32k | 3.100 | 6.500 | 0.150 | 0.010 | 2.00 | 2.00 | 1.60 |" in shown
    assert "| 0.90 | 2.00* | 2.00* | 2.00 (γ 5) |" in shown
    assert "| 7B, 128k | 16.0 | 16.0 | 16.0 | 16.0 | 16.0 | 16.0 |" in shown
    page, readme = tmp_path / "docs" / "speed.md", tmp_path / "README.md"
    begin, end = "<!-- speculation:begin (how) -->", "<!-- speculation:end -->"
    page.parent.mkdir()
    for path in (page, readme):
        path.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(speculation, "ROOT", tmp_path)
    monkeypatch.setattr(speculation, "FOLDER", folder)
    monkeypatch.setattr(speculation.Results.__init__, "__defaults__", (folder,))
    assert speculation.main(["--write"]) == 0 == speculation.main(["--write"])
    for path, lines in ((page, table), (readme, speculation.brief(results))):
        assert path.read_text(encoding="utf-8") == "\n".join(["before", begin, *lines, end, "after", ""])
    assert "| 7B, 32k | 8.00 | 4.00 | 2.00 | 0.22 |" in readme.read_text(encoding="utf-8").splitlines()
    assert (folder / "tables.md").read_text(encoding="utf-8") == shown


def test_nothing_is_written_before_anything_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation.Results.__init__, "__defaults__", (tmp_path,))
    assert speculation.main([]) == 1 and speculation.main(["--write"]) == 1
