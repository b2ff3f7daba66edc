"""The examples from outside the package: run through the command line, and the method held to the contract's rules."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import kvbench
from kvbench.cli.main import main
from kvbench.decoding import generate
from tests import zoo

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --config-dir has it; both are given back afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CONFIGS)])
    monkeypatch.setenv("PYTHONPATH", "")


def recent_four(**options):
    return kvbench.load_method(str(CONFIGS / "method" / "recent_four.yaml"), **options)


def test_both_run_together_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["--config-dir", str(CONFIGS), "method=recent_four", "dataset=phone_book", "dataset.limit=2"]
    assert main([*command, "logger=none", "model.dtype=float32"]) == 0, capsys.readouterr().err
    (path,) = (tmp_path / "results" / "runs").glob("*/metrics.json")
    metrics = json.loads(path.read_text())
    assert metrics["status"] == "ok"
    assert metrics["scores"]["phone_book"]["n"] == 2
    assert metrics["kv_bytes"]["used"]["codes"] > 0
    assert metrics["kv_bytes"]["fp16_equivalent"] > 1.4 * metrics["kv_bytes"]["used"]["total"]


def test_a_method_of_one_score_runs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["--config-dir", str(CONFIGS), "method=key_norm", "dataset=phone_book", "dataset.limit=1"]
    assert main([*command, "logger=none", "model.dtype=float32"]) == 0, capsys.readouterr().err
    (path,) = (tmp_path / "results" / "runs").glob("*/metrics.json")
    metrics = json.loads(path.read_text())
    assert metrics["status"] == "ok"
    assert metrics["kv_bytes"]["used"]["total"] < 0.6 * 2 * metrics["kv_bytes"]["fp16_equivalent"]  # in fp32


@pytest.mark.parametrize("length", [3, 20, 36, 37, 150])
def test_sinks_and_the_newest_tokens_are_exact(length: int) -> None:
    """Against stock keys of the same model: 4 + 32 tokens equal, those between them not."""
    model, ids = zoo.model("llama"), zoo.padded_batch([length])[0]
    method = recent_four()
    cache, exact = method.new_cache(model), kvbench.load_method("fp16").new_cache(model)
    for each in (cache, exact):
        generate(model, each, ids, max_new_tokens=1)
        each.settle()
    for layer, stock in zip(cache.layers, exact.layers, strict=True):
        for store, truth in zip(layer.stores(), stock.stores(), strict=True):
            rows = slice(0, 1)
            cuts = store.cuts(rows, 0, length)
            parts = [store.read(rows, a, b, torch.float32) for a, b in pairwise(cuts)]
            same = (torch.cat(parts, 2) == truth.tail.view(rows)).all(-1).all(1)[0].tolist()
            assert all(same[:4]) and all(same[-32:])
            assert not any(same[4:-32])


def test_a_padded_row_equals_the_row_alone_and_the_bill_is_that_of_its_rows() -> None:
    model, lengths = zoo.model("llama"), [40, 90, 61]
    ids, mask = zoo.padded_batch(lengths)
    cache = recent_four().new_cache(model)
    together = generate(model, cache, ids, mask, max_new_tokens=40)
    for row, length in enumerate(lengths):
        own = recent_four().new_cache(model)
        alone = generate(model, own, ids[row : row + 1, -length:], max_new_tokens=40)
        assert alone.tokens[0] == together.tokens[row]
        assert own.bill().used == cache.bill(row).used


def test_the_data_set_is_the_same_every_time_and_grows_with_its_limit() -> None:
    from kvbench import tasks

    small, large = (tasks.load({"_target_": "phone_book.PhoneBook", "limit": limit}) for limit in (2, 5))
    assert list(large.samples())[:2] == list(small.samples())
    for sample in large.samples():
        assert sample.answers[0] in sample.prompt[slice(*sample.context_span)]
        assert large.score(sample, f" {sample.answers[0]}.") == {"score": 1.0}
        assert large.score(sample, " 0") == {"score": 0.0}
