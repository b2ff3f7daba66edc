"""Points of several processes: medians, spread, lines, break-even and ratios to fp16, from files by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import DataError
from kvbench.results.replicates import fold_replicates, load_replicates, variation

WEIGHTS, GB = 10**10, 10**9


def row(setting: str, prompt: int, seconds: float, bits: float, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "setting": setting, "graphs": "always", "status": "ok", "prompt": prompt, "batch": 1, "new_tokens": 64,
        "tpot_s": {"median": seconds, "n": 63}, "weights": WEIGHTS, "kv_used": {"total": kv},
        "kv_reserved": {"total": kv}, "kv_fp16": prompt * 10**6, "nominal_bits": {"key": bits, "value": bits},
        "peak": {"decode": WEIGHTS + 2 * kv}, "read_bytes": WEIGHTS + kv, "ceiling": {"GB_s": 5000.0}, **more,
    }  # fmt: skip


def process(shift: float, model: str = "llama") -> dict[str, Any]:
    """fp16: 6 ms + 0.25 us a token; int4: 7 ms + 0.125 us a token; sizes 1 and 0.25 MB a token."""
    rows = []
    for prompt in (968, 3968, 7968):
        length = prompt + 32
        rows.append(row("fp16", prompt, 6e-3 + 0.25e-6 * length + shift, 16, 10**6 * length))
        rows.append(row("kivi:int4", prompt, 7e-3 + 0.125e-6 * length, 4, 250_000 * length))
    return {"model": model, "device": "H200", "dtype": "bfloat16", "rows": rows}


def test_medians_lines_and_ratios_by_hand():
    folded = fold_replicates([process(0.0), process(1e-4), process(-3e-4)])
    assert folded["processes"] == 3
    first = folded["points"][0]
    assert (first["setting"], first["prompt"]) == ("fp16", 968)
    assert first["tpot_s"] == pytest.approx(6.25e-3)
    assert first["medians_s"] == pytest.approx([6.25e-3, 6.35e-3, 5.95e-3])
    assert first["cv"] == pytest.approx(variation([6.25, 6.35, 5.95])) and first["unstable"]
    full, packed = (one for one in folded["points"] if one["prompt"] == 7968)
    assert not packed["unstable"] and packed["cv"] == 0
    assert packed["S"] == pytest.approx(8e-3 / 8e-3) and full["S"] == 1
    assert (packed["r_nom"], full["r_nom"]) == (4, 1)
    assert packed["r_alloc"] == pytest.approx(7968 / (2 * 0.25 * 8000))
    assert packed["GB_s"] == pytest.approx((WEIGHTS + 2 * GB) / 8e-3 / 1e9)
    assert packed["read_share"] == pytest.approx(packed["GB_s"] / 5000)
    # fp16 reads 8 GB at 4 TB/s in 2 of its 8 ms; 2 GB at 5 TB/s take 0.4 ms
    assert packed["S_cache"] == pytest.approx(8 / 6.4)
    line, other = folded["fits"]
    assert line["slope_s"] == pytest.approx(0.25e-6) and line["intercept_s"] == pytest.approx(6e-3)
    assert line["r2"] == pytest.approx(1) and line["BW_eff_GB_s"] == pytest.approx(4000)
    assert line["c0_s"] == pytest.approx(6e-3) and line["intercepts_s"] == pytest.approx([6e-3, 6.1e-3, 5.7e-3])
    assert other["break_even"] == pytest.approx(8000) and other["no_break_even"] is None
    assert other["break_evens"] == pytest.approx([8000, 7200, 10400])
    assert other["BW_eff_GB_s"] == pytest.approx(2000)


def test_points_that_do_not_fit_and_single_processes():
    content = process(0.0)
    content["rows"][0] |= {"status": "oom", "bytes_asked": 7}
    content["rows"].append({**content["rows"][1], "prompt": 64, "status": "failed"})
    folded = fold_replicates([content])
    lacking, *others = folded["points"]
    assert lacking["status"] == "oom" and lacking["bytes_asked"] == 7 and "S" not in lacking
    assert all(one["cv"] is None and not one["unstable"] for one in others)
    alone = next(one for one in others if one["prompt"] == 968)
    assert "S" not in alone  # no speed-up where fp16 does not fit
    assert folded["fits"][0]["slopes_s"] == []


def test_a_process_that_lacks_a_point_has_no_line_of_its_own():
    contents = [process(0.0), process(1e-4), process(-3e-4)]
    del contents[1]["rows"][0]
    folded = fold_replicates(contents)
    first = folded["points"][0]
    assert first["measured_by"] == [0, 2] and first["tpot_s"] == pytest.approx((6.25e-3 + 5.95e-3) / 2)
    full, packed = folded["fits"]
    assert full["intercepts_s"] == pytest.approx([6e-3, 5.7e-3]) and packed["intercepts_s"] == pytest.approx([7e-3] * 2)
    assert packed["break_evens"] == pytest.approx([8000, 10400])  # pairs of lines of one process


def test_files_must_belong_together(tmp_path: Path):
    names = [tmp_path / f"{name}.json" for name in ("a", "b", "c", "d")]
    for name, content in zip(names, (process(0.0), process(0.0), process(0.0, "other"), {"rows": []}), strict=True):
        name.write_text(json.dumps(content))
    assert len(load_replicates(names[:2])) == 2
    with pytest.raises(DataError, match=r"c\.json: model is other, but llama in .*a\.json"):
        load_replicates([names[0], names[2]])
    for name, arithmetic in zip(names[1:3], ("bfloat16", "float32"), strict=True):
        name.write_text(json.dumps({**process(0.0), "arithmetic": arithmetic}))
    assert len(load_replicates(names[:2])) == 2  # files of earlier versions record none: it was the dtype
    with pytest.raises(DataError, match=r"c\.json: arithmetic is float32, but bfloat16 in .*a\.json"):
        load_replicates([names[0], names[2]])
    with pytest.raises(DataError, match=r"d\.json does not contain points"):
        load_replicates([names[3]])
    with pytest.raises(DataError, match=r"e\.json cannot be read"):
        load_replicates([tmp_path / "e.json"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.clear(), "has no points"),
        (lambda rows: rows.__setitem__(0, 1), r"rows\[0\]"),
        (lambda rows: rows[1].pop("setting"), r"rows\[1\]: 'setting' is missing"),
        (lambda rows: rows[0].update(tpot_s=None), r"rows\[0\]"),
        (lambda rows: rows[0].update(tpot_s={"median": math.nan}), "median is nan"),
        (lambda rows: rows[0].update(compile=True), "with --compile and others without it"),
    ],
)
def test_rows_that_are_no_points_are_named(tmp_path, change, reason):
    content = process(0.0)
    change(content["rows"])
    path = tmp_path / "1.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=reason):
        load_replicates([path])


def test_a_file_counts_once(tmp_path):
    path = tmp_path / "1.json"
    path.write_text(json.dumps(process(0.0)))
    with pytest.raises(DataError, match="named twice"):
        load_replicates([path, tmp_path / "." / "1.json"])
