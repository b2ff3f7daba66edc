"""The page's plots as files."""

from __future__ import annotations

import pytest

from experiments.page.made import made_point, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.page.figures import largest
from tests.page.test_server_page import compared


@pytest.mark.slow
def test_the_plots_of_the_largest_group_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = tmp_path / "runs"
    write_made_run(runs, 1, "fp16")
    write_made_run(runs, 2, label="kivi $x_{2$ \ud83d", groups={"method": {"residual": 64}})
    write_made_run(runs, 3, "atom", setting=7)
    rows = [made_point(n, 1, n / 4e5, 100 * n) for n in (4096, 16384)]
    write_made_run(runs, 4, rows=rows, setting=8, groups={"dataset": {"name": "efficiency"}})
    write_made_run(runs, 5, "fp16", rows=compared(0.0), setting=9)
    write_made_run(runs, 6, rows=compared(1e-3), setting=9)
    assert report.main(["--results", str(runs), "--figures", str(tmp_path / "plots")]) == 0
    assert "tiny, mini (key_value at 2048)" in capsys.readouterr().out
    names = {"score-bytes", "kl-bytes", "score-tpot", "differences", "bytes", "tpot", "ttft"}
    names |= {f"points-{name}" for name in ("tpot", "ttft", "rate", "bytes", "peak")}
    files = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert set(files) == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert all(files[f"{name}.png"].startswith(b"\x89PNG") and b"<svg" in files[f"{name}.svg"] for name in names)


def test_the_largest_group_with_scores_is_drawn():
    runs = [{"id": run_id(number, 1), "status": "ok"} for number in range(3)]
    runs += [{"id": run_id(number, 2), "status": "ok", "score": [0.5]} for number in range(2)]
    runs += [{"id": run_id(number, 3), "status": "error", "score": [0.5]} for number in range(5)]
    assert largest(runs) == (run_id(0, 2).split("-")[0], runs[3:5])
    assert largest([]) == ("", [])


@pytest.mark.slow
def test_without_finished_runs_nothing_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_made_run(tmp_path / "runs", 1, unfinished=True, rows=[row(0, 1.0)])
    assert report.main(["--results", str(tmp_path / "runs"), "--figures", str(tmp_path / "plots")]) == 1
    assert "no run has figures" in capsys.readouterr().err
