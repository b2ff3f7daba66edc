"""Measured points of result files: every figure finds its field, in files of every version."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import DataError
from kvbench.results.point_record import MeasuredPoint, bench_points, circumstances, from_record

ABOUT: dict[str, Any] = {"model": "m", "device": "d", "setting": "s", "limit_gb": 8.0, "how": "bfloat16"}
CONDITIONS = {"prompt": 512, "batch": 4, "new_tokens": 32}
RECORD: dict[str, Any] = {
    **CONDITIONS,
    "status": "ok",
    "ttft_s": 0.1,
    "tpot_s": {"median": 0.02, "p99": 0.9},
    "tokens_per_s": 50.0,
    "weights": 1000,
    "kv_used": {"total": 200, "codes": 150},
    "peak": {"decode": 3000, "prefill": 4000},
    "predicted": {"tpot_s": 0.015, "expected_tpot_s": 0.017},
    "stepping": "graph",
    "itl_s": {"p50": 0.021, "p90": 0.022, "p99": 0.023},
    "read_bytes": 700,
    "read_share": 0.6,
}
WHOLE = MeasuredPoint(
    model="m",
    device="d",
    setting="s",
    prompt=512,
    batch=4,
    new_tokens=32,
    limit_gb=8.0,
    status="ok",
    ttft_s=0.1,
    tpot_s=0.02,
    tokens_per_s=50.0,
    weights=1000,
    kv_used=200,
    peak_decode=3000,
    peak_prefill=4000,
    predicted_tpot_s=0.015,
    expected_tpot_s=0.017,
    stepping="graph",
    how="bfloat16",
    itl_p50_s=0.021,
    itl_p90_s=0.022,
    itl_p99_s=0.023,
    read_bytes=700,
    read_share=0.6,
)


def test_every_figure_of_a_record_is_in_the_point() -> None:
    assert from_record(RECORD, **ABOUT) == WHOLE


def test_figures_that_were_not_measured_are_unknown() -> None:
    point = from_record({**CONDITIONS, "status": "ok", "tpot_s": {"median": 0.02}}, **ABOUT)
    unknown = {name for name, value in asdict(point).items() if value is None}
    figures = "ttft_s tokens_per_s weights kv_used peak_decode peak_prefill predicted_tpot_s expected_tpot_s"
    assert unknown == {*figures.split(), "itl_p50_s", "itl_p90_s", "itl_p99_s", "read_bytes", "read_share"}
    assert (point.tpot_s, point.stepping) == (0.02, "")


def test_keys_of_the_first_version_are_read() -> None:
    old = {"context": 128, "batch": 2, "steps": 31, "status": "ok", "tpot_s": {"median": 0.5}}
    point = from_record({**old, "kv": 77, "peak_decode": 99}, **ABOUT)
    assert (point.prompt, point.new_tokens, point.kv_used, point.peak_decode) == (128, 32, 77, 99)
    assert from_record({"context": 1, "batch": 1, "status": "oom"}, **ABOUT).new_tokens == 1


def test_a_point_that_ran_out_of_memory_has_its_conditions_alone() -> None:
    point = from_record({**RECORD, "status": "oom"}, **ABOUT)
    conditions = MeasuredPoint("m", "d", "s", 512, 4, 32, 8.0, "oom", how="bfloat16")
    assert point == conditions and point.tpot_s is None


def test_random_keys_and_values_give_no_rate() -> None:
    point = from_record({**RECORD, "fill": "random"}, **ABOUT)
    assert point.tokens_per_s is None and point.tpot_s == 0.02


def test_points_of_one_group_differ_in_setting_and_batch_alone() -> None:
    same = [{**RECORD, "batch": 8}, {**RECORD, "ttft_s": 9.0}]
    assert {from_record(one, **{**ABOUT, "setting": "t"}).group for one in same} == {WHOLE.group}
    others = [{"model": "n"}, {"device": "e"}, {"limit_gb": None}, {"how": "float32"}]
    groups = [from_record(RECORD, **{**ABOUT, **other}).group for other in others]
    groups += [from_record({**RECORD, name: 7}, **ABOUT).group for name in ("prompt", "new_tokens")]
    assert len({WHOLE.group, *groups}) == 7


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        (("bfloat16", True, None), "bfloat16, compiled"),
        (("bfloat16", False, "random"), "bfloat16, random keys and values"),
        ((None, True, "random"), "compiled, random keys and values"),
        ((None, False, "prompt"), ""),
    ],
)
def test_conditions_in_words(conditions: tuple[Any, ...], text: str) -> None:
    assert circumstances(*conditions) == text


def written(folder: Path, *rows: dict[str, Any], **head: Any) -> Path:
    path = folder / "points.json"
    about = {"model": "m", "device": "d", "memory_limit_gb": 8.0, "dtype": "bfloat16", **head}
    path.write_text(json.dumps({**about, "rows": rows}), encoding="utf-8")
    return path


def test_a_bench_file_gives_its_measured_points(tmp_path: Path) -> None:
    row = {**RECORD, "setting": "s"}
    failed = {"setting": "s", "status": "failed"}
    path = written(tmp_path, row, failed, {**row, "status": "oom", "graphs": "never"}, {**row, "graphs": "always"})
    one, two, three = bench_points(path)
    assert one == three == WHOLE
    assert (two.setting, two.status, two.limit_gb) == ("s, eager", "oom", 8.0)


@pytest.mark.parametrize(
    ("command", "row", "how"),
    [
        ("tpot --compile", {}, "bfloat16, compiled"),
        ("tpot --compile", {"compile": False}, "bfloat16"),
        ("memory", {"compile": True, "fill": "random"}, "bfloat16, compiled, random keys and values"),
        ("memory", {}, "bfloat16"),
    ],
)
def test_a_bench_file_says_how_it_was_measured(tmp_path: Path, command: str, row: dict[str, Any], how: str) -> None:
    (point,) = bench_points(written(tmp_path, {**RECORD, "setting": "s", **row}, command=command))
    assert point.how == how


def test_files_of_other_commands_have_no_points(tmp_path: Path) -> None:
    assert list(bench_points(written(tmp_path, {**RECORD, "setting": "s"}, command="kernels tpot"))) == []
    (tmp_path / "list.json").write_text("[]")
    assert list(bench_points(tmp_path / "list.json")) == []
    (tmp_path / "bare.json").write_text("{}")
    assert list(bench_points(tmp_path / "bare.json")) == []


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        list(bench_points(tmp_path / "absent.json"))
    for lacking in ("setting", "prompt", "tpot_s", "batch"):
        row = {key: value for key, value in {**RECORD, "setting": "s"}.items() if key != lacking}
        with pytest.raises(DataError, match=r"points\.json: a row is not a measured point"):
            list(bench_points(written(tmp_path, row)))
