"""One row per run, whatever its tasks, from any number of processes."""

from __future__ import annotations

import csv
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.loggers.csv import CsvLogger
from kvbench.run import run
from tests.run_support import config


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> dict:
    return run(config(tmp_path_factory.mktemp("runs")))


def table(path: Path) -> list[dict]:
    with path.open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_a_run_appends_its_row(tmp_path):
    path = tmp_path / "sub" / "runs.csv"
    logger = {"name": "csv", "path": str(path)}
    for made in (config(tmp_path / "r", logger=logger), config(tmp_path / "r", "fp16", logger=logger)):
        run(made)
    kivi, full = table(path)
    assert (kivi["method"], kivi["quantizer"], kivi["method.residual"]) == ("kivi", "int2", "32")
    assert (full["method"], full["method.residual"]) == ("fp16", "")
    assert kivi["status"] == full["status"] == "ok"
    assert 0 < float(kivi["scores.first.score"]) < 1
    assert int(kivi["kv_bytes.used.total"]) < int(full["kv_bytes.used.total"])
    assert float(kivi["ttft_s.median"]) > 0
    run(config(tmp_path / "r", logger=logger))  # now paired with fp16 on disk already; nothing new to say
    assert len(table(path)) == 2


def test_new_columns_rewrite_the_file(tmp_path, metrics):
    logger = CsvLogger(tmp_path / "runs.csv")
    logger.finish(metrics)
    other = json.loads(json.dumps(metrics))
    other["scores"] = {"another": other["scores"]["first"]}
    logger.finish(other)
    logger.finish(metrics)
    rows = table(tmp_path / "runs.csv")
    assert len(rows) == 3
    assert rows[0]["scores.another.score"] == "" != rows[1]["scores.another.score"]
    assert rows[0]["scores.first.score"] == rows[2]["scores.first.score"] != ""


def test_many_writers_lose_no_row(tmp_path, metrics):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: CsvLogger(tmp_path / "runs.csv").finish(metrics), range(40)))
    rows = table(tmp_path / "runs.csv")
    assert len(rows) == 40
    assert {row["run_id"] for row in rows} == {metrics["run_id"]}


def test_a_full_disk_leaves_whole_rows(tmp_path, metrics, monkeypatch):
    logger = CsvLogger(tmp_path / "runs.csv")
    logger.finish(metrics)
    before = (tmp_path / "runs.csv").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        logger.finish(metrics)
    assert (tmp_path / "runs.csv").read_bytes() == before


def test_a_failing_logger_does_not_lose_the_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ConnectionError("the service went away")

    monkeypatch.setattr(CsvLogger, "sample", fail)
    monkeypatch.setattr(CsvLogger, "finish", fail)
    metrics = run(config(tmp_path, logger={"name": "csv", "path": str(tmp_path / "runs.csv")}))
    assert metrics["status"] == "ok"
    said = capsys.readouterr().err
    assert said.count("logger csv failed (ConnectionError: the service went away)") == 1
