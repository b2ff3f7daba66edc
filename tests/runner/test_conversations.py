"""Conversations of the bundled model: a stored prefix is reused, or everything is prefilled again."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.report import main
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from kvbench.util.confdir import group_options
from tests.run_files import store_of
from tests.run_support import config


def talk(folder: Path, method: str, **dataset: Any) -> dict[str, Any]:
    made = config(folder, method)
    made["model"] = {**yaml.safe_load(group_options("model")["tiny"].read_text()), "dtype": "float32"}
    made["dataset"] = yaml.safe_load((Path(group_options("dataset")["mini"]).parent / "mini/turns.yaml").read_text())
    made["dataset"] |= {"tasks": ["variable_tracking"], "lengths": [512], "limit": 1, "questions": 2, **dataset}
    return answer_run(made)


@pytest.mark.slow  # 10 s of processor time
def test_reuse_and_prefill_anew_differ_where_the_prefix_is_packed_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    runs = {
        (method, turns): talk(tmp_path, method, turns=turns)
        for method in ("fp16", "kivi")
        for turns in ("stored", "anew")
    }
    rows = {key: next(iter(store_of(metrics).samples().rows.values())) for key, metrics in runs.items()}
    likelihoods = {key: row["nll"]["sum"] for key, row in rows.items()}
    fp16, kivi = ([rows[method, turns] for turns in ("stored", "anew")] for method in ("fp16", "kivi"))
    assert fp16[0]["tokens"] == fp16[1]["tokens"] and fp16[0]["scores"]["score"] == 1.0
    assert likelihoods["fp16", "stored"] == pytest.approx(likelihoods["fp16", "anew"], abs=1e-3)
    first = [row["prediction"].split("\n")[0] for row in kivi]
    assert first[0] == first[1]  # nothing was said before
    differences = [abs(likelihoods[method, "stored"] - likelihoods[method, "anew"]) for method in ("fp16", "kivi")]
    assert differences[0] < 1e-6 < 1e-5 < differences[1], differences
    # the last turn of both has the same tokens in its cache
    assert kivi[0]["kv_bytes"]["fp16_equivalent"] >= kivi[1]["kv_bytes"]["fp16_equivalent"]
    own = talk(tmp_path, "fp16", history="own")
    row = next(iter(store_of(own).samples().rows.values()))
    assert row["tokens"] == fp16[0]["tokens"]  # its own answers are the reference answers

    names = [metrics["run_id"] for metrics in (*runs.values(), own)]
    assert main(["--results", str(tmp_path), "--by-turn", *names]) == 0
    shown = capsys.readouterr().out
    assert "variable_tracking@512" in shown
    assert [line.split()[0] for line in shown.splitlines() if line[:1].isdigit()] == ["1", "2"]
    assert main(["--results", str(tmp_path), "--by-turn", *names, "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 2 * 5 and {line["stderr"] for line in lines} == {""}
    assert {line["run"].partition(", ")[2] for line in lines} == {"stored", "anew", "stored own"}
    assert all(float(line["score"]) == 1.0 for line in lines if line["run"].startswith("fp16"))
    assert main(["--results", str(tmp_path), "--by-turn", names[0], "--format", "markdown"]) == 0
    assert "| turn | fp16 dtype=float32, stored |" in capsys.readouterr().out
    store = store_of(own)
    store.write_metrics({**own, "data": None})
    assert main(["--results", str(tmp_path), "--by-turn", own["run_id"], "--format", "markdown"]) == 0
    assert "| turn | fp16 dtype=float32 |" in capsys.readouterr().out


def test_runs_without_turns_have_no_table_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = answer_run(config(tmp_path, "fp16"))
    assert isinstance(store_of(metrics), RunStore)
    assert main(["--results", str(tmp_path), "--by-turn", metrics["run_id"]]) == 1
    assert "has no turns" in capsys.readouterr().err
