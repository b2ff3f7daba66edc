"""The line of inter-token time over length, and where a method passes fp16."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.results import tables
from kvbench.results.inter_token import Line, break_even, describe_fits, fit, fit_lines, fit_record
from kvbench.results.notes import notes


def metrics(points: dict[int, tuple[float, float | None]], new_tokens: int | None = 128) -> dict[str, Any]:
    """A run of one batch: prompt -> seconds, and fp16's where it has any."""
    scores = {}
    for prompt, (own, fp16) in points.items():
        figures: dict[str, Any] = {"status": "ok", "tpot_s": {"median": own}, "new_tokens": new_tokens}
        if fp16 is not None:
            figures["vs_fp16"] = {"tpot_s": own / fp16}
        scores[f"efficiency@{prompt}"] = {"points": {"batches": {"1": figures, "2": {"status": "oom"}}}}
    config = {"model": "tiny", "dataset": "efficiency", "method": {}, "decoding": {}, "seed": 0}
    return {"label": "kivi int4", "config": config, "env": {}, "scores": scores}


def test_a_line_through_two_lengths_and_the_published_break_even():
    """Llama-3.1-8B on an H100: bf16 4.37e-5 ms a token and 6.44 ms, fp8 2.37e-5 and 6.58: 7.0k tokens."""
    bf16, fp8 = Line(4.37e-8, 6.44e-3, 2), Line(2.37e-8, 6.58e-3, 2)
    assert break_even(fp8, bf16) == pytest.approx(7000)
    assert break_even(bf16, fp8) is None
    assert break_even(Line(bf16.slope, 5e-3, 2), bf16) is None, "parallel lines never cross"
    assert break_even(Line(1e-8, 5e-3, 2), bf16) == 0
    computed = fit([(1064.0, bf16.intercept + 1064 * bf16.slope), (8064.0, bf16.intercept + 8064 * bf16.slope)])
    assert computed is not None
    assert (computed.slope, computed.intercept, computed.lengths) == (pytest.approx(4.37e-8), pytest.approx(6.44e-3), 2)
    assert fit([(1.0, 2.0), (1.0, 3.0)]) is None and fit([]) is None


def test_lines_of_a_run_are_by_batch_and_say_where_it_passes_fp16():
    def seconds(prompt: int) -> tuple[float, float]:
        return 6.58e-3 + 2.37e-8 * (prompt + 64), 6.44e-3 + 4.37e-8 * (prompt + 64)

    run = metrics({prompt: seconds(prompt) for prompt in (1024, 8192, 32768)})
    ((batch, figures),) = fit_lines(run).items()
    assert batch == 1 and figures["lengths"] == 3
    assert figures["slope_s"] == pytest.approx(2.37e-8) and figures["fp16_intercept_s"] == pytest.approx(6.44e-3)
    assert figures["break_even"] == pytest.approx(7000)
    line = {key: figures[key] for key in ("slope_s", "intercept_s", "lengths")}
    assert fit_record(run) == {"1": line}  # fp16's line is no part of the record: its run may come later
    (text,) = describe_fits(run)
    assert "6.58 ms + 23.7 ns per token" in text and text.endswith("faster than fp16 beyond 7,000 tokens")
    assert f"kivi int4: {text}" in notes([run])


def test_without_fp16_or_a_second_length_there_is_less_to_say():
    alone = metrics({1024: (1e-3, None), 2048: (2e-3, None)}, new_tokens=None)
    assert "break_even" not in fit_lines(alone)[1] and "fp16" not in describe_fits(alone)[0]
    assert fit_lines(metrics({1024: (1e-3, 1e-3)})) == fit_record(metrics({1024: (1e-3, 1e-3)})) == {}
    slower = metrics({1024: (2e-3, 1e-3), 2048: (4e-3, 1.5e-3)})
    assert describe_fits(slower)[0].endswith("faster than fp16 at no length")


def written(slope: float, fp16_slope: float, fp16_s: float = 1e-3) -> dict[str, Any]:
    """Return a real run of two lengths in which TPOT grows by `slope` a token from 2 ms, and fp16's from `fp16_s`."""
    content = json.loads((Path(__file__).parent / "fixtures" / "2-points.json").read_text(encoding="utf-8"))
    content = copy.deepcopy(content)
    for name, entry in content["scores"].items():
        (figures,) = entry["points"]["batches"].values()
        length = int(name.partition("@")[2]) + figures["new_tokens"] / 2
        own = 2e-3 + slope * length
        figures["tpot_s"]["median"] = own
        figures["vs_fp16"]["tpot_s"] = own / (fp16_s + fp16_slope * length)
    return content


@pytest.mark.parametrize(
    ("fp16_slope", "fp16_s", "cell", "plain"),
    [(3e-6, 1e-3, "1,000", 1000.0), (3e-6, 4e-3, "any length", 0.0), (1e-6, 1e-3, "never", None)],
)
def test_the_break_even_is_a_column_and_a_number_of_the_csv(
    fp16_slope: float, fp16_s: float, cell: str, plain: float | None
) -> None:
    run = written(2e-6, fp16_slope, fp16_s)
    header, body = tables.table_grid([run])
    assert {line[header.index("break-even")].main for line in body} == {cell}
    assert {line[header.index("slope")].main for line in body} == {"2 µs"}
    rows = list(csv.DictReader(io.StringIO(tables.runs_csv([run]))))
    assert [float(row["itl_slope_s"]) for row in rows] == pytest.approx([2e-6, 2e-6])
    assert [row["itl_lengths"] for row in rows] == ["2", "2"]
    assert [float(row["break_even_tokens"] or "nan") for row in rows] == pytest.approx(
        [plain if plain is not None else float("nan")] * 2, nan_ok=True
    )


def test_one_length_has_neither_column_in_the_table() -> None:
    run = written(2e-6, 3e-6)
    del run["scores"]["efficiency@128"]
    header, _ = tables.table_grid([run])
    assert "slope" not in header and "break-even" not in header and "read" in header
