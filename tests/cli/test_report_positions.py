"""`python -m kvbench.report --by-position` over stored runs with known answers."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli import report
from kvbench.results.samples import encode_row, read_samples
from kvbench.runner.run import answer_run
from tests.run_support import config

FIDELITY = {"_target_": "kvbench.tasks.fidelity.Fidelity", "name": "fidelity", "window": 80, "prefill": 64, "limit": 2}


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Path, str, str, dict]:
    """fp16's run, one of kivi whose third token is another in one of two answers of each task, and one of fidelity."""
    folder = tmp_path_factory.mktemp("runs")
    base, other = (answer_run(config(folder, name)) for name in ("fp16", "kivi"))
    rows = read_samples(Path(base["run_dir"]) / "samples.jsonl").rows
    for number, row in enumerate(rows.values()):
        if number < 2:  # one of each task
            row["tokens"][2] += 1
            row["scores"]["score"] -= 0.125
    (Path(other["run_dir"]) / "samples.jsonl").write_bytes(b"".join(map(encode_row, rows.values())))
    text = folder / "text.txt"
    text.write_text(" ".join(f"word{k * k % 61}" for k in range(200)), encoding="utf-8")
    plain = config(folder)
    compared = answer_run({**plain, "dataset": {**FIDELITY, "text": str(text)}})
    return folder, other["run_id"], base["run_id"], compared


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def shown(folder: Path, *arguments: str) -> int:
    return report.main(["--results", str(folder), "--by-position", *arguments])


def lines(printed: str) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(printed))


def test_answers_are_compared_with_fp16s(stored, tmp_path, capsys) -> None:
    folder, run, base, _ = stored
    assert shown(folder, run, "--format", "csv") == 0
    whole = list(lines(capsys.readouterr().out))
    for task in ("first", "second@64"):
        mine = [line for line in whole if line["task"] == task]
        assert {line["first"]: float(line["value"]) for line in mine if line["measure"] == "still_equal"} == {
            "1": 1.0, "2": 1.0, "4": 0.5
        }  # fmt: skip
        figures = {line["measure"]: float(line["value"]) for line in mine}
        assert (figures["score_lower"], figures["score_higher"], figures["score_mean"]) == (1, 0, -0.0625)
    assert shown(folder, run) == shown(folder, run, "--format", "markdown") == 0
    printed = capsys.readouterr().out
    assert printed.count("score changed in 50.0% of 2 samples: 1 lower, 0 higher") == 4 and "| 4 | 0 | 2 |" in printed
    assert shown(folder, base, "--base", run, "--format", "csv") == 0
    turned = [line for line in lines(capsys.readouterr().out) if line["measure"] == "score_higher"]
    assert [float(line["value"]) for line in turned] == [1, 1]
    shutil.copytree(folder / run, tmp_path / "elsewhere")
    assert shown(folder, base, "--base", str(tmp_path / "elsewhere"), "--format", "csv") == 0
    assert list(lines(capsys.readouterr().out))[-4]["value"] == turned[-1]["value"] == "1"


def test_fidelity_is_that_of_the_run(stored, capsys) -> None:
    folder, _, _, compared = stored
    assert shown(folder, compared["run_id"], "--width", "100", "--format", "csv") == 0
    (task,) = compared["scores"].values()
    figures = {line["measure"]: line for line in lines(capsys.readouterr().out)}
    assert (figures["kld_mean"]["first"], figures["kld_mean"]["last"], figures["kld_mean"]["n"]) == ("1", "15", "30")
    known = task["fidelity"]
    assert float(figures["kld_mean"]["value"]) == pytest.approx(known["kld"]["mean"])
    assert float(figures["kld_p99"]["value"]) == pytest.approx(known["kld"]["p99"])
    assert float(figures["other_top"]["value"]) == pytest.approx(1 - known["same_top"]["share"])
    assert float(figures["top_mass"]["value"]) == pytest.approx(known["top_mass"]) and 0.9 < known["top_mass"] < 1
    assert shown(folder, compared["run_id"]) == 0
    assert "8 to 15" in capsys.readouterr().out


def test_the_plot_has_a_panel_per_measure(stored, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    folder, run, _, compared = stored
    assert shown(folder, run, compared["run_id"], "--plot", str(tmp_path / "a.svg")) == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count('<g id="axes_') == 5


def test_misuse_is_refused(stored, tmp_path, capsys) -> None:
    folder, run, *_ = stored
    assert shown(folder, run, "--width", "0") != 0
    assert "--width=0: is not a number of tokens" in capsys.readouterr().err
    for option in (["--width", "4"], ["--base", run], ["--plot", "a.png"]):
        assert report.main(["--results", str(folder), *option]) != 0
        assert "needs --by-position" in capsys.readouterr().err
    alone = answer_run(config(tmp_path))
    assert shown(tmp_path, alone["run_id"]) != 0
    assert "there is no fp16 run with the same model" in capsys.readouterr().err


def test_metrics_say_where_free_answers_leave_fp16s(tmp_path) -> None:
    """The fp16 run that comes later adds it to the runs before it."""
    before = answer_run(config(tmp_path))
    assert all("left" not in entry for entry in before["scores"].values())
    answer_run(config(tmp_path, "fp16"))
    later = json.loads((Path(before["run_dir"]) / "metrics.json").read_text())
    assert {key: entry["left"]["n"] for key, entry in later["scores"].items()} == {"first": 2, "second@64": 2}
