"""Every column of the three tables, from one record by hand; what is compared with stock; points without figures."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.bench.point_table import COLUMNS, HEAD, NOTES, point_cells, point_table

GIB = 2**30
ROW: dict[str, Any] = {
    "setting": "kivi",
    "prompt": 4096,
    "batch": 2,
    "new_tokens": 5,
    "status": "ok",
    "tpot_s": {"median": 0.004, "p10": 0.003, "p90": 0.005, "p99": 0.006},
    "first_step_s": 0.007,
    "predicted": {"tpot_s": 0.002, "expected_tpot_s": 0.0025},
    "over_roof": 2.0,
    "GB_s": 1234.0,
    "read_share": 0.5,
    "same": {"alike": 3, "of": 4},
    "peak": {"decode": 3 * GIB, "prefill": 8 * GIB},
    "stepping": "graph",
    "search_s": 0.1,
    "prefill_s": 0.6,
    "weights": 2 * GIB,
    "kv_used": {"total": GIB},
    "kv_reserved": {"total": 2 * GIB},
    "layer_kv": GIB // 4,
    "prefill_path": "cuda",
    "ttft_s": 0.7,
    "tokens_per_s": 99.0,
    "over_used": 1.5,
}
STOCK = {**ROW, "setting": "dynamic", "prefill_s": 0.3, "peak": {"prefill": 6 * GIB}}
OTHER = {**STOCK, "batch": 1, "prefill_s": 0.1}


def cells(command: str, row: dict[str, Any] = ROW, rows: tuple[dict[str, Any], ...] = (OTHER, STOCK)) -> dict[str, Any]:
    return dict(zip([*HEAD, *COLUMNS[command]], point_cells(row, command, [*rows, row]), strict=True))


def test_columns_of_tpot() -> None:
    assert cells("tpot") == pytest.approx(
        {
            "setting": "kivi", "prompt": "4k", "B": 2, "new": 5, "TPOT ms": 4.0, "p10": 3.0, "p90": 5.0, "p99": 6.0,
            "first": 7.0, "roof": 2.0, "x": 2.0, "expected": 2.5, "GB/s": 1234.0, "% read": 50.0, "same": "3/4",
            "peak": 3.0, "steps": "graph",
        }
    )  # fmt: skip
    bare = cells("tpot", {key: ROW[key] for key in ("setting", "prompt", "batch", "new_tokens", "status")})
    assert bare["same"] == "-" and all(bare[name] is None for name in COLUMNS["tpot"] if name != "same")


def test_columns_of_prefill_compare_with_stock_at_the_same_point() -> None:
    assert cells("prefill") == pytest.approx(
        {
            "setting": "kivi", "prompt": "4k", "B": 2, "new": 5, "search ms": 100.0, "ms": 600.0, "stock ms": 300.0,
            "x": 2.0, "peak": 8.0, "stock peak": 6.0, "weights": 2.0, "KV": 1.0, "above": 4.0, "layer K/V": 0.25,
            "path": "cuda",
        }
    )  # fmt: skip
    alone = cells("prefill", rows=(OTHER,))
    assert alone["x"] is alone["stock ms"] is alone["stock peak"] is None and alone["ms"] == pytest.approx(600.0)
    assert cells("prefill", {**ROW, "kv_reserved": None})["above"] is None
    assert cells("prefill", {**ROW, "prefill_s": None})["x"] is None


def test_columns_of_memory() -> None:
    assert cells("memory") == pytest.approx(
        {
            "setting": "kivi", "prompt": "4k", "B": 2, "new": 5, "TTFT ms": 700.0, "TPOT ms": 4.0, "roof": 2.0,
            "tokens/s": 99.0, "weights": 2.0, "KV": 1.0, "peak dec": 3.0, "x": 1.5, "peak pre": 8.0, "steps": "graph",
        }
    )  # fmt: skip


def test_a_point_without_figures_says_why() -> None:
    failed = {**ROW, "status": "failed", "message": "ValueError: no"}
    for command, columns in COLUMNS.items():
        assert point_cells(failed, command, [failed])[4:] == [None] * (len(columns) - 1) + ["ValueError: no"]
    full = {**ROW, "status": "oom"}
    assert point_cells(full, "tpot", [full])[-1] == "oom"
    assert point_cells({**full, "bytes_asked": GIB // 2}, "tpot", [full])[-1] == "oom, 0.50 GiB asked for"


def test_lines_are_sorted_by_prompt_and_then_by_batch() -> None:
    rows = [{**ROW, "prompt": prompt, "batch": batch} for prompt, batch in ((4096, 2), (128, 8), (128, 1))]
    firsts = [text.split()[1:3] for text in point_table(rows, "memory").splitlines()[2:5]]
    assert firsts == [["4k", "2"], ["128", "8"], ["128", "1"]]  # as measured
    sorted_firsts = [text.split()[1:3] for text in point_table(rows, "prefill").splitlines()[2:5]]
    assert sorted_firsts == [["128", "1"], ["128", "8"], ["4k", "2"]]
    assert set(NOTES) == set(COLUMNS)
