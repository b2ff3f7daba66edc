"""Columns of a table of runs: their cells, and the plain numbers that the CSV has in their place."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import pytest

from kvbench.results import columns, record, tables
from kvbench.results.columns import LIST, TABLE, RunLine, reach_text, score_cell, status
from kvbench.results.point_columns import POINT_COLUMNS
from kvbench.results.record_scores import Mean
from kvbench.util.table import Cell
from tests.results.test_tables import run


def full(**changes: Any) -> dict[str, Any]:
    """A run with a different number in every figure."""
    content = run("kivi int2", tasks=2)
    used = {"total": 2048, "codes": 1, "scales": 2, "window": 3, "index": 4}
    content |= {
        "kv_bytes": {"used": used, "reserved": {**used, "total": 4096}, "fp16_equivalent": 9, "ratio": 2.5},
        "peak_bytes": {"prefill": 3 << 20, "decode": 2 << 20, "kind": "cuda_allocator", "rss": 1 << 20, "n": 1},
        "ttft_s": {"median": 0.25, "n": 3},
        "tpot_s": {"median": 0.012, "p99": 1.5, "first_step": 0.5, "n": 9},
        "tokens_per_s": 80.5,
        "mean": {"score": 0.625, "stderr": 0.0125, "n": 40, "vs_fp16": {"diff": -0.125, "stderr": 0.05, "n": 40}},
        "speculation": {
            "gamma": 4,
            "draft": None,
            "draft_weights": None,
            "acceptance_rate": 0.75,
            "stderr": 0.0625,
            "tokens_per_round": 3.5,
            "rounds": 2,
            "drafted": 8,
            "accepted": 6,
            "tokens": 7,
            "n": 2,
            "speedup": 1.5,
            "expected_speedup": 1.75,
            "round_times": {
                "draft_s": 0.012,
                "verify_s": 0.008,
                "sampling_s": 0.0005,
                "flush_s": 0.0001,
                "acceptance": 0.875,
                "tokens": 3.5,
                "expected_tokens": 3.625,
                "tpot_s": 0.0059,
                "expected_tpot_s": 0.0055,
                "why": "+7% per token",
            },
        },
    }
    first, second = content["scores"].values()
    first["vs_fp16"] |= {"low": -0.125, "high": -0.075}
    first["nll"] = {"mean": 0.5, "stderr": 0.1, "n": 3, "vs_fp16": None}
    second |= {
        "score": None,
        "stderr": None,
        "n": 7,
        "vs_fp16": {"diff": 0.5, "stderr": None, "n": 7},
        "nll": None,
        "perplexity": {
            "ppl": 7.25,
            "stderr": 0.5,
            "bits_per_byte": 1.125,
            "mode": "decode",
            "prefill": 0,
            "chunk": 1,
            "windows": 7,
            "vs_fp16": {"diff": 0.0625, "stderr": 0.03125, "n": 7},
        },
    }
    return content | changes


def of_those(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What was found of what is wanted, in its own order: a column that is new since is no matter here."""
    return {name: value for name, value in found.items() if name in wanted}


def line(content: dict[str, Any], name: str = "a name") -> RunLine:
    return RunLine(name, record.read_metrics(record.fill_defaults(content)))


def test_the_csv_has_every_figure_as_a_plain_number() -> None:
    (row,) = csv.DictReader(io.StringIO(tables.runs_csv([full()])))
    wanted = {
        "run": "kivi int2",
        "run_id": "0123456789-0123456789",
        "status": "ok",
        "task0@2048 score": "0.9",
        "task0@2048 stderr": "0.03",
        "task0@2048 low": "",
        "task0@2048 high": "",
        "task0@2048 n": "20",
        "task0@2048 vs_fp16": str(0.9 - 1),
        "task0@2048 vs_fp16_stderr": "0.012",
        "task0@2048 vs_fp16_low": "-0.125",
        "task0@2048 vs_fp16_high": "-0.075",
        "task0@2048 nll": "0.5",
        "task0@2048 ppl": "",
        "task0@2048 bits_per_byte": "",
        "task1@2048 score": "",
        "task1@2048 stderr": "",
        "task1@2048 low": "",
        "task1@2048 high": "",
        "task1@2048 n": "7",
        "task1@2048 vs_fp16": "0.5",
        "task1@2048 vs_fp16_stderr": "",
        "task1@2048 vs_fp16_low": "",
        "task1@2048 vs_fp16_high": "",
        "task1@2048 nll": "",
        "task1@2048 ppl": "7.25",
        "task1@2048 bits_per_byte": "1.125",
        "kv_bytes": "2048",
        "kv_reserved": "4096",
        "kv_ratio": "2.5",
        "peak_prefill": str(3 << 20),
        "peak_decode": str(2 << 20),
        "peak_kind": "cuda_allocator",
        "peak_rss": str(1 << 20),
        "ttft_s": "0.25",
        "tpot_s": "0.012",
        "tpot_p99_s": "1.5",
        "tokens_per_s": "80.5",
        "device": "a GPU",
        "dtype": "bfloat16",
        "arithmetic": "bfloat16",
        "acceptance_rate": "0.75",
        "acceptance_stderr": "0.0625",
        "tokens_per_round": "3.5",
        "speedup": "1.5",
        "expected_speedup": "1.75",
        "round_draft_s": "0.012",
        "round_verify_s": "0.008",
        "round_sampling_s": "0.0005",
        "round_flush_s": "0.0001",
        "round_acceptance": "0.875",
        "round_tokens": "3.5",
        "round_expected_tokens": "3.625",
        "round_tpot_s": "0.0059",
        "round_expected_tpot_s": "0.0055",
        "round_why": "+7% per token",
    }
    assert of_those(row, wanted) == wanted


def test_the_cells_of_a_table() -> None:
    content = full()
    header, (body,) = tables.table_grid([content])
    cells = dict(zip(header, body, strict=True))
    wanted = {
        "": Cell("kivi int2"),
        "task0@2048": Cell("0.900 ±.063", "Δ -0.100 ±.025"),
        "task1@2048": Cell("ppl 7.250 ±1.223", "Δ +0.0625 ±.0765"),
        "KV": Cell("2 KiB"),
        "ratio": Cell("2.50x"),
        "peak": Cell("3 MiB", "dec 2 MiB"),
        "TTFT": Cell("250 ms"),
        "TPOT": Cell("12 ms", "p99 1.50 s"),
        "accepted": Cell("0.750 ±.131", "3.50 a round"),
        "speed-up": Cell("1.50x"),
        "round": Cell("12 ms + 8 ms + 0.5 ms + 0.1 ms", "expected TPOT 5.5 ms"),
    }
    assert of_those(cells, wanted) == wanted
    content["scores"]["task1@2048"]["score"] = 0.5
    header, (body,) = tables.table_grid([content])
    assert dict(zip(header, body, strict=True))["mean"] == Cell("0.625 ±.025", "Δ -0.125 ±.101")
    assert "accepted" not in tables.table_grid([full(speculation=None)])[0]
    assert "speed-up" not in tables.table_grid([full(speculation=None)])[0]


def listed(content: dict[str, Any], name: str) -> str:
    lines = [line(content)]
    (column,) = [column for column in columns.shown_columns(lines, LIST) if column.name == name]
    assert column.cell is not None
    return column.cell(lines[0]).main


def test_the_list_of_runs_has_columns_of_its_own() -> None:
    names = [column.name for column in columns.shown_columns([line(full())], LIST)]
    wanted = ["run", "method", "model", "data", "status", "samples", "score", "KV", "code"]
    assert [name for name in names if name in wanted] == wanted
    content = full(code={"0123456789ab": 20})
    values = {name: listed(content, name) for name in wanted}
    assert values == {
        "run": "0123456789-0123456789",
        "method": "a name",
        "model": "tiny",
        "data": "mini",
        "status": "ok",
        "samples": "20/20",
        "score": "0.625",
        "KV": "2 KiB",
        "code": "012345",
    }
    wrapping = [column.name for column in columns.shown_columns([line(content)], LIST) if column.wraps]
    assert [name for name in wrapping if name in wanted] == ["method", "model", "data", "code"]


@pytest.mark.parametrize(
    ("code", "parts", "text"),
    [
        ({}, None, "-"),
        ({"unknown": 4}, ["unknown"], "unknown"),
        ({"0123456789ab": 4}, ["method", "cache"], "012345, older: method, cache"),
        ({"0123456789ab": 4, "b" * 12: 1}, None, "2 kinds"),
        ({"0123456789ab": 4, "unknown": 1}, ["unknown", "task"], "2 kinds, older: task"),
    ],
)
def test_the_code_of_a_run_in_the_list(code, parts, text) -> None:
    older = None if parts is None else {"samples": 1, "parts": parts}
    assert listed(full(code=code, older=older), "code") == text


def test_what_the_list_shows_in_place_of_a_score() -> None:
    nothing = {"score": None, "stderr": None, "n": 0, "vs_fp16": None}
    content = full(mean=nothing)
    assert listed(content, "score") == "ppl 7.25"
    assert listed({**content, "scores": {}}, "score") == "-"
    batches = {"max_batch": 1, "oom_batch": None, "best_batch": 1, "tokens_per_s": 12345.6, "batches": {}}
    points = {"efficiency@64": {"score": None, "n": 0, "points": batches}}
    assert listed({**content, "scores": points, "tokens_per_s": 12345.6}, "score") == "1.235e+04/s"
    assert listed({**content, "scores": points, "tokens_per_s": None}, "score") == "-"


def test_a_run_that_did_not_finish_has_no_number_of_requested_samples() -> None:
    content = full(status="unfinished")
    content["samples"]["requested"] = None
    assert listed(content, "samples") == "20" and listed(content, "status") == "unfinished"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"status": "error"}, "error"),
        ({"status": "interrupted"}, "interrupted"),
        ({"status": "oom", "oom": {"bytes_asked": 3 << 30, "sample": None, "message": ""}}, "oom: 3 GiB more"),
        ({"status": "oom", "oom": {"bytes_asked": None, "sample": None, "message": ""}}, "oom"),
        ({"status": "older", "older": {"samples": 1, "parts": ["method", "cache"]}}, "older code: method, cache"),
        ({"status": "older", "older": {"samples": 1, "parts": ["unknown"]}}, "unknown code"),
    ],
)
def test_a_status_below_the_name(changes, text) -> None:
    assert status(line(full(**changes)).run) == text


def test_scores_errors_and_what_is_missing() -> None:
    assert score_cell(None) == score_cell(Mean(score=None)) == Cell("-")
    assert score_cell(Mean(score=1.0)) == Cell("1.000")
    assert score_cell(Mean(score=1.0, stderr=0.0, n=8)) == Cell("1.000 ±.324")  # eight of eight may be two thirds
    assert (reach_text(None), reach_text(0.0123), reach_text(1.5), reach_text(0.03125, 4)) == (
        "",
        " ±.012",
        " ±1.500",
        " ±.0312",
    )


@pytest.mark.parametrize(
    ("peak", "cell"),
    [
        ({"prefill": None, "decode": None, "rss": 1 << 20}, Cell("1 MiB", "RSS")),
        ({"prefill": None, "decode": None, "rss": None}, Cell("-")),
        ({"prefill": 1 << 20, "decode": 2 << 20, "rss": None}, Cell("2 MiB", "dec 2 MiB")),
        ({"prefill": 3 << 20, "decode": None, "rss": None}, Cell("3 MiB", "dec -")),
    ],
)
def test_the_peak_is_that_of_the_higher_phase(peak, cell) -> None:
    content = full(peak_bytes={**peak, "kind": None, "n": 1})
    header, (body,) = tables.table_grid([content])
    assert body[header.index("peak")] == cell


def test_drafts_of_which_nothing_is_known_are_a_dash() -> None:
    content = full()
    content["speculation"] |= {"acceptance_rate": None, "speedup": None}
    header, (body,) = tables.table_grid([content])
    assert body[header.index("accepted")] == body[header.index("speed-up")] == Cell("-")
    content["tpot_s"]["p99"] = None
    header, (body,) = tables.table_grid([content])
    assert body[header.index("TPOT")] == Cell("12 ms")


def test_units_of_columns_are_documented() -> None:
    units = {column.name: column.unit for column in (*columns.COLUMNS, *POINT_COLUMNS)}
    assert (units["KV"], units["TTFT"], units["TPOT"], units["peak"]) == (
        "bytes",
        "seconds",
        "seconds",
        "bytes; share of weights and KV",
    )
    assert all(column.places for column in columns.COLUMNS) and TABLE != LIST
