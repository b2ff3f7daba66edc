"""W&B offline: what was logged is read back from its file; without a key it goes offline by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench import loggers
from kvbench.loggers.wandb import WandbLogger, has_key
from kvbench.run import run
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
    metrics = run(config(tmp_path / "r", logger=logger_config(tmp_path)))
    assert "wandb: no key, so offline" in capsys.readouterr().err
    (path,) = (tmp_path / "w" / "wandb").glob("offline-run-*/*.wandb")
    found = read(path)
    assert found["run_id"] == metrics["run_id"]
    assert found["config"]["method"]["residual"] == 32
    assert found["config"]["model"]["name"] == "toy"
    summary = found["summary"]
    assert summary["status"] == "ok"
    assert summary["scores/first/score"] == pytest.approx(metrics["scores"]["first"]["score"])
    assert summary["kv_bytes/used/codes"] == metrics["kv_bytes"]["used"]["codes"]
    assert summary["tpot_s/median"] == pytest.approx(metrics["tpot_s"]["median"])
    assert sum("sample/kv_bytes_used" in row for row in found["history"]) == 4
    (table,) = (tmp_path / "w" / "wandb").glob("offline-run-*/files/media/table/samples*.json")
    content = json.loads(table.read_text())
    assert len(content["data"]) == 4
    cells = dict(zip(content["columns"], content["data"][0], strict=True))
    assert {"prompt_head", "prompt_tail", "prediction", "reference", "score"} <= set(cells)
    assert cells["prompt_head"].startswith("Read: word")
    assert cells["reference"].startswith(" word")


def test_off(tmp_path):
    metrics = run(config(tmp_path / "r", logger=logger_config(tmp_path, "disabled")))
    assert metrics["status"] == "ok"
    assert not list(tmp_path.glob("w/wandb/offline-run-*"))


def test_online_without_a_key_says_what_to_do_and_the_run_goes_on(tmp_path, capsys):
    metrics = run(config(tmp_path / "r", dataset={"limit": 1}, logger=logger_config(tmp_path, "online")))
    assert metrics["status"] == "ok"
    assert "logger wandb failed" in capsys.readouterr().err


def test_two_runs_in_one_process(tmp_path):
    for name in ("fp16", "kivi"):
        run(config(tmp_path / "r", name, dataset={"limit": 1}, logger=logger_config(tmp_path, "offline")))
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
    said: list[str] = []
    logger = WandbLogger(settings, "0123456789-0123456789", config(tmp_path), "kivi int2", said.append)
    modes = []
    real = logger._init

    def init(module, mode):
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("cannot connect")
        return real(module, mode)

    monkeypatch.setattr(logger, "_init", init)
    logger._start().finish()
    assert modes == ["online", "offline"]
    assert said == ["wandb: not reachable (cannot connect), so offline"]


def test_wandb_is_imported_only_when_it_is_used(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, kvbench.loggers as l;"
        "l.load(type('L', (), {'name': 'csv', 'path': 'x.csv'})(), 'id', {}, 'kivi', print);"
        "sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_none_does_nothing():
    logger = loggers.load(SimpleNamespace(name="none"), "id", {}, "kivi", print)
    logger.sample({})
    logger.finish({})
