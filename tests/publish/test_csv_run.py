"""A run that only wrote CSV, interrupted and resumed, is in W&B's offline file whole after it is published."""

from __future__ import annotations

import json

import pytest

from kvbench.publish.command import main
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from kvbench.runner.session import Session
from tests.loggers.wandb_file import read
from tests.run_support import config

pytest.importorskip("wandb")


def test_a_resumed_csv_run_is_published_whole(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    settings = config(tmp_path / "r", logger={"name": "csv", "path": str(tmp_path / "runs.csv")})
    rows = Session.rows

    def interrupted(self, batch):
        if batch[0].id == "second/1":
            raise KeyboardInterrupt
        return rows(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer_run(settings)
    metrics = answer_run(settings)
    arguments = [metrics["run_id"], "--results", str(tmp_path / "r"), "--dir", str(tmp_path / "w"), "--mode", "offline"]
    assert main([*arguments, "--prompts"]) == 0
    (file,) = (tmp_path / "w").rglob("*.wandb")
    content = read(file)
    store = RunStore(tmp_path / "r", metrics["run_id"])
    stored = store.samples().rows
    assert sum("sample/kv_MiB" in step for step in content["history"]) == len(stored) == 4
    (table,) = (tmp_path / "w").rglob("samples*.table.json")
    columns, lines = (json.loads(table.read_text())[key] for key in ("columns", "data"))
    cells = [dict(zip(columns, line, strict=True)) for line in lines]
    assert [line["id"] for line in cells] == list(stored)
    assert [line["prediction"] for line in cells] == [row["prediction"] for row in stored.values()]
    assert all(line["prompt_head"].startswith("Read: word") and line["reference"] for line in cells)
    assert content["summary"]["scores/first/score"] == pytest.approx(metrics["scores"]["first"]["score"])
    assert content["config"]["method"]["residual"] == 32

    wandb = {"name": "wandb", "project": "kvbench", "mode": "offline", "dir": str(tmp_path / "w")}
    answer_run({**settings, "logger": wandb})  # what is already sent is not sent again
    assert list((tmp_path / "w").rglob("*.wandb")) == [file]
