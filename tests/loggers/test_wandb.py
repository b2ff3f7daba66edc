"""W&B offline: what was logged is read back from its file; without a key it goes offline by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench import loggers
from kvbench.loggers.wandb import WandbLogger
from kvbench.loggers.wandb_service import Service, has_key
from kvbench.results import samples
from kvbench.runner.run import answer_run
from tests.loggers.wandb_file import read
from tests.run_support import config

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def logger_config(tmp_path: Path, mode: str = "auto") -> dict:
    return {"name": "wandb", "project": "toy", "mode": mode, "dir": str(tmp_path / "w")}


def test_a_run_without_a_key_is_offline_and_complete(tmp_path, capsys):
    metrics = answer_run(config(tmp_path / "r", logger=logger_config(tmp_path)))
    assert "wandb: no API key is configured, so it runs offline" in capsys.readouterr().err
    (path,) = (tmp_path / "w" / "wandb").glob("offline-run-*/*.wandb")
    found = read(path)
    assert found["run_id"] == metrics["run_id"]
    assert found["config"]["method"]["residual"] == 32
    assert found["config"]["model"]["name"] == "toy"
    summary = found["summary"]
    assert summary["status"] == "ok"
    assert summary["scores/first/score"] == pytest.approx(metrics["scores"]["first"]["score"])
    assert summary["kv_MiB/used/codes"] == pytest.approx(metrics["kv_bytes"]["used"]["codes"] / 2**20)
    assert summary["tpot_ms/median"] == pytest.approx(1000 * metrics["tpot_s"]["median"])
    assert (found["run_group"], found["job_type"]) == ("toy/toy", "kivi")
    assert sorted(found["tags"]) == ["int2", "kivi", "toy"]
    assert sum("sample/kv_MiB" in row for row in found["history"]) == 4
    timed = [row for row in found["history"] if "sample/ttft_ms" in row]
    assert len(timed) == 3  # the warm-up's time does not count
    for row in timed:
        assert 0 < row["sample/tpot_ms"] <= row["sample/inter_token_ms/p99"]
        assert row["sample/tokens_per_s"] > 0
        assert sum(row["sample/inter_token_ms/histogram/values"]) == 2  # of 4 tokens, without the first step
    assert found["history"][0]["sample/peak_MiB/decode"] > 0  # on a CPU, the first batch is measured
    files = found["artifacts"][f"run-{metrics['run_id']}"]
    folder = tmp_path / "r" / metrics["run_id"]
    assert set(files) == {"metrics.json", "config.yaml", "env.json", "samples.jsonl"}
    assert all(copy.read_bytes() == (folder / name).read_bytes() for name, copy in files.items())
    (table,) = (tmp_path / "w" / "wandb").glob("offline-run-*/files/media/table/samples*.json")
    content = json.loads(table.read_text())
    assert len(content["data"]) == 4
    cells = dict(zip(content["columns"], content["data"][0], strict=True))
    assert {"prompt_head", "prompt_tail", "prediction", "reference", "score"} <= set(cells)
    assert cells["prompt_head"].startswith("Read: word")
    assert cells["reference"].startswith(" word")


def test_off(tmp_path):
    metrics = answer_run(config(tmp_path / "r", logger=logger_config(tmp_path, "disabled")))
    assert metrics["status"] == "ok"
    assert not list(tmp_path.glob("w/wandb/offline-run-*"))


def test_online_without_a_key_says_what_to_do_and_the_run_goes_on(tmp_path, capsys):
    metrics = answer_run(config(tmp_path / "r", dataset={"limit": 1}, logger=logger_config(tmp_path, "online")))
    assert metrics["status"] == "ok"
    assert "logger wandb failed" in capsys.readouterr().err


def test_two_runs_in_one_process(tmp_path):
    for name in ("fp16", "kivi"):
        answer_run(config(tmp_path / "r", name, dataset={"limit": 1}, logger=logger_config(tmp_path, "offline")))
    files = sorted((tmp_path / "w" / "wandb").glob("offline-run-*/*.wandb"))
    assert len({read(path)["run_id"] for path in files}) == 2


def test_a_key_is_found_where_wandb_keeps_it(tmp_path, monkeypatch):
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password not-a-key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    assert has_key()


def test_an_unreachable_service_is_offline_in_auto(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    settings = SimpleNamespace(project="p", entity=None, group=None, tags=(), mode="auto", dir=str(tmp_path / "w"))
    messages: list[str] = []
    logger = WandbLogger(settings, "0123456789-0123456789", config(tmp_path), "kivi int2", messages.append)
    modes = []
    real = logger.service._init

    def init(module, mode, fixed):
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("cannot connect")
        return real(module, mode, fixed)

    monkeypatch.setattr(logger.service, "_init", init)
    logger._start().finish()
    assert modes == ["online", "offline"]
    assert messages == ["wandb: not reachable (cannot connect), so it runs offline"]


def test_wandb_is_imported_only_when_it_is_used(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, kvbench.loggers as l;"
        "l.load_logger(type('L', (), {'name': 'csv', 'path': 'x.csv'})(), 'id', {}, 'kivi', print);"
        "sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_none_does_nothing():
    logger = loggers.load_logger(SimpleNamespace(name="none"), "id", {}, "kivi", print)
    logger.sample({})
    logger.finish({})


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "w" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)


def tables(tmp_path: Path) -> list[list[str]]:
    """Sample ids of each table, oldest first."""
    paths = sorted((tmp_path / "w").rglob("samples*.table.json"), key=lambda path: path.stat().st_ctime_ns)
    return [[row[0] for row in json.loads(path.read_text())["data"]] for path in paths]


def test_a_finished_run_is_sent_when_it_is_repeated_and_only_once(tmp_path):
    answer_run(config(tmp_path / "r"))
    settings = config(tmp_path / "r", logger=logger_config(tmp_path))
    metrics = answer_run(settings)
    (path,) = files(tmp_path)
    content = read(path)
    assert content["run_id"] == metrics["run_id"]
    assert content["summary"]["scores/first/score"] == pytest.approx(metrics["scores"]["first"]["score"])
    assert sum("sample/kv_MiB" in row for row in content["history"]) == 4
    assert [len(ids) for ids in tables(tmp_path)] == [4]
    answer_run(settings)
    assert files(tmp_path) == [path]
    answer_run(config(tmp_path / "r", logger={**logger_config(tmp_path), "dir": str(tmp_path / "elsewhere")}))
    assert list((tmp_path / "elsewhere").rglob("*.wandb"))


def test_a_resumed_run_has_the_samples_of_all_its_sessions(tmp_path, monkeypatch):
    from kvbench.runner.session import Session

    rows = Session.rows

    def interrupted(self, batch):
        if batch[0].id == "second/1":
            raise KeyboardInterrupt
        return rows(self, batch)

    settings = config(tmp_path / "r", logger=logger_config(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer_run(settings)
    answer_run(settings)
    first, last = files(tmp_path)
    stored = list(samples.read_samples(next((tmp_path / "r").glob("*/samples.jsonl"))).rows)
    assert tables(tmp_path) == [stored[:2], stored]
    assert sum("sample/kv_MiB" in row for row in read(first)["history"]) == 2
    assert (read(first)["exit_code"], read(last)["exit_code"]) == (1, 0)
    history = [row for row in read(last)["history"] if "sample/kv_MiB" in row]
    assert [row["_step"] for row in history] == [0, 1, 2, 3]


def test_what_failed_once_is_sent_by_the_next_session(tmp_path, monkeypatch, capsys):
    settings = config(tmp_path / "r", dataset={"limit": 2}, logger=logger_config(tmp_path, "offline"))
    with monkeypatch.context() as patch:
        patch.setattr(Service, "_init", lambda *_: (_ for _ in ()).throw(ConnectionError("away")))
        answer_run(settings)
    assert "logger wandb failed (ConnectionError: away)" in capsys.readouterr().err
    assert not files(tmp_path)
    answer_run(settings)
    assert len(files(tmp_path)) == 1
    assert [len(ids) for ids in tables(tmp_path)] == [2]


def test_a_run_that_ended_out_of_memory_is_a_result_and_one_that_failed_is_none(tmp_path, monkeypatch):
    from kvbench.runner.session import Session

    codes = {}
    for status, error in (("oom", MemoryError()), ("error", ValueError("a bad record"))):
        monkeypatch.setattr(Session, "rows", lambda self, batch, error=error: (_ for _ in ()).throw(error))
        place = tmp_path / status
        settings = config(place / "r", dataset={"limit": 1}, logger=logger_config(place, "offline"))
        assert answer_run(settings)["status"] == status
        (path,) = files(place)
        codes[status] = read(path)["exit_code"]
    assert codes == {"oom": 0, "error": 1}


def test_offline_is_another_place_than_the_service(tmp_path, monkeypatch):
    def place(mode: str, **changes) -> str | None:
        settings = SimpleNamespace(
            **{"project": "p", "entity": None, "group": None, "tags": (), "mode": mode, "dir": str(tmp_path)} | changes
        )
        return WandbLogger(settings, "id", config(tmp_path), "kivi", print).destination()

    places = [place("offline"), place("online"), place("online", project="q"), place("online", entity="e")]
    places.append(place("offline", dir=str(tmp_path / "w")))
    assert len(set(places)) == len(places)
    assert place("auto") == place("offline")
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    assert place("auto") == place("online")
