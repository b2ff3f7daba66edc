"""Columns of a table of points: their cells, and the plain numbers that the CSV has in their place."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvbench.results import record, tables
from kvbench.util.table import Cell
from tests.results.test_tables import run

POINT = {
    "status": "ok",
    "ttft_s": 0.5,
    "search_s": 0.125,
    "prefill_s": 0.375,
    "first_step_s": 0.0625,
    "tpot_s": {"median": 0.02, "mean": 0.03, "p10": 0.01, "p90": 0.04, "p99": 0.05, "n": 3},
    "itl_s": {"p50": 0.021, "p90": 0.041, "p99": 0.051},
    "tokens_per_s": 123.456,
    "capture_s": 1.25,
    "stepping": "graph (not compiled: a reason)",
    "speculation": {"rounds": 2, "drafted": 8, "accepted": 6, "tokens": 7},
    "forced": 0.9,
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
        "why": None,
    },
    "path": "triton",
    "weights": 1001,
    "over_used": 1.0625,
    "over_reserved": 1.03125,
    "predicted": {
        "gpu": "h200",
        "ttft_s": 0.25,
        "tpot_s": 0.015,
        "expected_tpot_s": 0.018,
        "bound": "memory",
        "peak_prefill": 11,
        "peak_decode": 12,
    },
    "read_bytes": 2048,
    "GB_s": 3.5,
    "ceiling": None,
    "read_share": 0.875,
    "over_roof": 1.125,
    "new_tokens": 8,
    "kv_used": 3072,
    "kv_reserved": 4096,
    "peak_prefill": 5 << 20,
    "peak_decode": 4 << 20,
    "kv_ratio": 2.25,
    "kv_ratio_reserved": 2.125,
    "r_nom": 4.0,
    "r_alloc": 3.5,
    "energy": {"J_per_token": 1.5, "J": 30.0, "s": 20.0, "W": 1.5},
    "vs_fp16": {"ttft_s": 0.9, "tpot_s": 0.8, "tokens_per_s": 1.7, "peak_decode": 0.6},
}
OOM = {"status": "oom", "bytes_asked": 3 << 30, "phase": "prefill"}


def of_points(batches: dict[str, Any], key: str = "efficiency@64") -> dict[str, Any]:
    sums = {"max_batch": 1, "oom_batch": None, "best_batch": 1, "tokens_per_s": 1.0, "batches": batches}
    scores = {key: {"score": None, "n": 0, "points": sums}}
    mean = {"score": None, "stderr": None, "n": 0, "vs_fp16": None}
    return record.fill_defaults({**run("kivi int2"), "scores": scores, "mean": mean})


def test_the_csv_has_every_figure_of_a_point() -> None:
    first, second = csv.DictReader(io.StringIO(tables.runs_csv([of_points({"2": POINT, "4": OOM})])))
    assert first == {
        "run": "kivi int2",
        "run_id": "0123456789-0123456789",
        "model": "tiny",
        "device": "a GPU",
        "prompt": "64",
        "batch": "2",
        "status": "ok",
        "ttft_s": "0.5",
        "search_s": "0.125",
        "prefill_s": "0.375",
        "first_step_s": "0.0625",
        "tpot_median_s": "0.02",
        "tpot_mean_s": "0.03",
        "tpot_p10_s": "0.01",
        "tpot_p90_s": "0.04",
        "tpot_p99_s": "0.05",
        "itl_p50_s": "0.021",
        "itl_p90_s": "0.041",
        "itl_p99_s": "0.051",
        "read_bytes": "2048",
        "GB_s": "3.5",
        "read_share": "0.875",
        "over_roof": "1.125",
        "S": "1.25",
        "itl_slope_s": "",
        "itl_intercept_s": "",
        "itl_lengths": "",
        "break_even_tokens": "",
        "tokens_per_s": "123.456",
        "peak_prefill": str(5 << 20),
        "peak_decode": str(4 << 20),
        "weights": "1001",
        "kv_used": "3072",
        "kv_reserved": "4096",
        "kv_ratio": "2.25",
        "kv_ratio_reserved": "2.125",
        "r_nom": "4.0",
        "r_alloc": "3.5",
        "J_per_token": "1.5",
        "over_used": "1.0625",
        "over_reserved": "1.03125",
        "capture_s": "1.25",
        "stepping": "graph (not compiled: a reason)",
        "rounds": "2",
        "drafted": "8",
        "accepted": "6",
        "forced": "0.9",
        "path": "triton",
        "round_draft_s": "0.012",
        "round_verify_s": "0.008",
        "round_sampling_s": "0.0005",
        "round_flush_s": "0.0001",
        "round_acceptance": "0.875",
        "round_tokens": "3.5",
        "round_expected_tokens": "3.625",
        "round_tpot_s": "0.0059",
        "round_expected_tpot_s": "0.0055",
        "round_why": "",
        "predicted_ttft_s": "0.25",
        "predicted_tpot_s": "0.015",
        "predicted_expected_tpot_s": "0.018",
        "predicted_peak_prefill": "11",
        "predicted_peak_decode": "12",
        "ttft_s_vs_fp16": "0.9",
        "tpot_s_vs_fp16": "0.8",
        "tokens_per_s_vs_fp16": "1.7",
        "peak_decode_vs_fp16": "0.6",
        "bytes_asked": "",
    }
    shown = {"run", "run_id", "model", "device", "prompt", "batch", "status", "bytes_asked"}
    assert {key for key, text in second.items() if text} == shown
    assert (second["batch"], second["status"], second["bytes_asked"]) == ("4", "oom", str(3 << 30))


def test_the_cells_of_points() -> None:
    header, (first, second) = tables.table_grid([of_points({"2": POINT, "4": OOM})])
    assert dict(zip(header, first, strict=True)) == {
        "": Cell("kivi int2"),
        "prompt": Cell("64"),
        "batch": Cell("2"),
        "TTFT": Cell("500 ms", "search 125 ms"),
        "TPOT": Cell("20 ms", "roof 15 ms"),
        "p90": Cell("41 ms", "p99 51 ms"),
        "read": Cell("2 KiB", "88% of the ceiling"),
        "S": Cell("1.25"),
        "J/token": Cell("1.5"),
        "tokens/s": Cell("123.5", "1.70x fp16"),
        "KV": Cell("3 KiB", "2.25x less"),
        "peak": Cell("4 MiB", "1.062 of both"),
        "steps": Cell("graph"),
        "round": Cell("12 ms + 8 ms + 0.5 ms + 0.1 ms", "expected TPOT 5.5 ms"),
    }
    cells = dict(zip(header, second, strict=True))
    assert cells[""] == Cell("") and cells["batch"] == Cell("4") and cells["TTFT"] == Cell("oom", "3 GiB more")
    assert all(cells[name] == Cell("-") for name in ("TPOT", "p90", "read", "tokens/s", "KV", "peak", "steps"))


def test_figures_that_a_point_lacks_are_left_out_of_its_cells() -> None:
    bare = {**POINT, "search_s": 0.0, "vs_fp16": None, "read_share": None, "kv_ratio": None, "over_used": None}
    bare |= {"itl_s": {"p90": 0.041}}
    header, (body,) = tables.table_grid([of_points({"2": bare})])
    cells = dict(zip(header, body, strict=True))
    assert cells["TTFT"] == Cell("500 ms", "roof 250 ms") and cells["p90"] == Cell("41 ms")
    assert cells["read"] == Cell("2 KiB") and cells["tokens/s"] == Cell("123.5") and cells["KV"] == Cell("3 KiB")
    assert cells["peak"] == Cell("4 MiB")
    header, (body,) = tables.table_grid([of_points({"2": {**bare, "predicted": None, "itl_s": None}})])
    cells = dict(zip(header, body, strict=True))
    assert cells["TTFT"] == Cell("500 ms") and cells["TPOT"] == Cell("20 ms") and cells["p90"] == Cell("-")
    unknown = tables.table_grid([of_points({"2": {**OOM, "bytes_asked": None}})])[1][0]
    assert unknown[header.index("TTFT")] == Cell("oom")


def test_a_run_without_points_has_a_line_among_those_that_have_some_and_none_in_the_csv() -> None:
    failed = record.fill_defaults({**run("atom"), "scores": {}, "status": "error", "run_id": "a" * 10 + "-" + "b" * 10})
    runs = [of_points({"2": POINT, "4": POINT}), failed]
    header, body = tables.table_grid(runs)
    assert [cells[0] for cells in body] == [Cell("kivi int2"), Cell(""), Cell("atom", "error")]
    assert all(cell == Cell("-") for name, cell in zip(header, body[2], strict=True) if name)
    assert [row["run"] for row in csv.DictReader(io.StringIO(tables.runs_csv(runs)))] == ["kivi int2"] * 2
