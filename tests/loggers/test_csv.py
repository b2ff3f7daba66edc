"""One row per run, whatever its tasks, from any number of processes."""

from __future__ import annotations

import csv
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.loggers.csv import CsvLogger
from kvbench.runner.run import answer_run
from tests.run_support import config


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> dict:
    return answer_run(config(tmp_path_factory.mktemp("runs")))


def table(path: Path) -> list[dict]:
    with path.open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_a_run_appends_its_row(tmp_path):
    path = tmp_path / "sub" / "runs.csv"
    logger = {"name": "csv", "path": str(path)}
    for made in (config(tmp_path / "r", logger=logger), config(tmp_path / "r", "fp16", logger=logger)):
        answer_run(made)
    kivi, full = table(path)
    assert (kivi["method"], kivi["quantizer"], kivi["method.residual"]) == ("kivi", "int2", "32")
    assert (full["method"], full["method.residual"]) == ("fp16", "")
    assert kivi["status"] == full["status"] == "ok"
    assert 0 < float(kivi["scores.first.score"]) < 1
    assert int(kivi["kv_bytes.used.total"]) < int(full["kv_bytes.used.total"])
    assert float(kivi["ttft_s.median"]) > 0
    answer_run(config(tmp_path / "r", logger=logger))  # now paired with fp16 on disk already; nothing new to say
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
        runs = [{**metrics, "run_id": f"{number:010}-0123456789"} for number in range(40)]
        list(pool.map(CsvLogger(tmp_path / "runs.csv").finish, runs))
    rows = table(tmp_path / "runs.csv")
    assert len(rows) == 40
    assert {row["run_id"] for row in rows} == {each["run_id"] for each in runs}


def test_a_full_disk_leaves_whole_rows(tmp_path, metrics, monkeypatch):
    logger = CsvLogger(tmp_path / "runs.csv")
    logger.finish(metrics)
    before = (tmp_path / "runs.csv").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        logger.finish({**metrics, "status": "error"})
    assert (tmp_path / "runs.csv").read_bytes() == before


def test_a_failing_logger_does_not_lose_the_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ConnectionError("the service went away")

    monkeypatch.setattr(CsvLogger, "sample", fail)
    monkeypatch.setattr(CsvLogger, "finish", fail)
    metrics = answer_run(config(tmp_path, logger={"name": "csv", "path": str(tmp_path / "runs.csv")}))
    assert metrics["status"] == "ok"
    printed = capsys.readouterr().err
    assert printed.count("logger csv failed (ConnectionError: the service went away)") == 1


def test_a_row_lost_to_a_kill_or_a_failure_is_sent_by_the_next_session(tmp_path, monkeypatch, capsys):
    path = tmp_path / "runs.csv"
    settings = config(tmp_path / "r", dataset={"limit": 2}, logger={"name": "csv", "path": str(path)})

    def fail(*_):
        raise ConnectionError("the service went away")

    with monkeypatch.context() as patch:
        patch.setattr(CsvLogger, "finish", fail)
        answer_run(settings)
    assert "run the same command again later to send them" in capsys.readouterr().err
    assert not path.exists()
    answer_run(settings)  # nothing is missing but the row
    assert len(table(path)) == 1
    answer_run(settings)
    assert len(table(path)) == 1
    path.unlink()
    answer_run(settings)
    assert len(table(path)) == 1


def test_a_row_that_says_something_else_is_appended(tmp_path, metrics):
    logger = CsvLogger(tmp_path / "runs.csv")
    logger.finish(metrics)
    paired = json.loads(json.dumps(metrics))
    paired["scores"]["first"]["vs_fp16"] = {"diff": 0.5, "stderr": None, "n": 2}
    logger.finish(paired)  # only the difference to a later fp16 run is new
    assert len(table(tmp_path / "runs.csv")) == 1
    logger.finish({**metrics, "status": "interrupted"})
    logger.finish(metrics)
    assert [row["status"] for row in table(tmp_path / "runs.csv")] == ["ok", "interrupted", "ok"]


@pytest.mark.parametrize("cut", [1, 5, 60, 200])
def test_a_torn_last_line_does_not_swallow_the_next_row(tmp_path, metrics, cut):
    path = tmp_path / "runs.csv"
    logger = CsvLogger(path)
    metrics = {**metrics, "env": {**metrics["env"], "commit": "c" * 40}}  # the last cell
    first, second, third = ({**metrics, "run_id": f"{name * 10}-0123456789"} for name in "abc")
    logger.finish(first)
    logger.finish(second)
    path.write_bytes(path.read_bytes()[:-cut])
    logger.finish(third)
    rows = table(path)
    assert [row["run_id"][0] for row in rows] == (["a", "b", "c"] if cut < 40 else ["a", "c"])
    assert all(None not in row and None not in row.values() for row in rows)
    assert path.with_name("runs.csv.damaged").exists() == (cut > 40)
    logger.finish(second)
    assert {row["run_id"][0] for row in table(path)} == {"a", "b", "c"}


def test_lists_are_no_cells(metrics):
    from kvbench.loggers.csv import flat_row

    assert not [key for key, value in flat_row(metrics).items() if isinstance(value, (list, dict))]
    assert "method.preset" not in flat_row({**metrics, "config": {**metrics["config"], "method": {"preset": "x"}}})


def test_a_place_without_room_for_a_lock_is_said_and_not_waited_for(tmp_path, metrics, monkeypatch):
    def refused(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(PermissionError, match=r"runs\.csv\.lock"):
        CsvLogger(tmp_path / "runs.csv").finish(metrics)
