"""One flat row for a run: its keys and values, and which changes make another row."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvbench import loggers
from kvbench.loggers.base import Logger, Safe
from kvbench.loggers.csv import CsvLogger, flat_row, flatten


def metrics(**changes: Any) -> dict[str, Any]:
    pair = {"diff": -0.25, "stderr": 0.125, "n": 3}
    points = {"max_batch": 8, "batches": {"8": {"status": "ok", "tpot_s": {"median": 0.5}}}}
    return {
        "run_id": "0123456789-0123456789",
        "status": "ok",
        "label": "kivi int2+key.bits=4 of mine",
        "config": {
            "model": "tiny",
            "quantizer": "int2",
            "dataset": "mini",
            "seed": 7,
            "method": {
                "_target_": "x.Y",
                "takes": ["a"],
                "preset": "p",
                "residual": 32,
                "split": [1, 2],
                "quantizer": 3,
            },
        },
        "scores": {
            "t@64": {"score": 0.5, "stderr": 0.1, "n": 3, "vs_fp16": pair},
            "u": {"score": None, "stderr": None, "n": 0, "vs_fp16": None, "points": points},
        },
        "mean": {"score": 0.5, "stderr": None, "n": 3, "vs_fp16": None},
        "samples": {"done": 3, "left_out": ["a"]},
        "kv_bytes": {"used": {"total": 10}},
        "peak_bytes": {"prefill": 5},
        "ttft_s": {"median": 0.25},
        "tpot_s": {"median": 0.125},
        "attention": {"path": "reference"},
        "inter_token": {"1": {"slope_s": 1e-6}},
        "oom": {"bytes_asked": 99, "message": "no"},
        "tokens_per_s": 80.0,
        "error": "first line\nsecond",
        "env": {"device_name": "A GPU", "torch": "2", "python": "3", "kvbench": "1", "commit": "c", "cpu": "unsaid"},
        **changes,
    }


def test_a_row_has_every_figure_under_a_dotted_key() -> None:
    row = flat_row(metrics())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row.pop("time"))
    assert row == {
        "run_id": "0123456789-0123456789",
        "status": "ok",
        "model": "tiny",
        "method": "kivi",
        "quantizer": "int2",
        "dataset": "mini",
        "seed": 7,
        "method.residual": 32,
        "scores.t@64.score": 0.5,
        "scores.t@64.stderr": 0.1,
        "scores.t@64.n": 3,
        "scores.t@64.vs_fp16.diff": -0.25,
        "scores.t@64.vs_fp16.stderr": 0.125,
        "scores.t@64.vs_fp16.n": 3,
        "scores.u.score": None,
        "scores.u.stderr": None,
        "scores.u.n": 0,
        "scores.u.vs_fp16.diff": None,
        "scores.u.vs_fp16.stderr": None,
        "scores.u.vs_fp16.n": None,
        "scores.u.max_batch": 8,
        "scores.u.b8.status": "ok",
        "scores.u.b8.tpot_s.median": 0.5,
        "mean.score": 0.5,
        "mean.stderr": None,
        "mean.n": 3,
        "mean.vs_fp16.diff": None,
        "mean.vs_fp16.stderr": None,
        "mean.vs_fp16.n": None,
        "samples.done": 3,
        "kv_bytes.used.total": 10,
        "peak_bytes.prefill": 5,
        "ttft_s.median": 0.25,
        "tpot_s.median": 0.125,
        "attention.path": "reference",
        "inter_token.1.slope_s": 1e-6,
        "oom.bytes_asked": 99,
        "tokens_per_s": 80.0,
        "error": "first line",
        "env.device_name": "A GPU",
        "env.dtype": None,
        "env.arithmetic": None,
        "env.torch": "2",
        "env.transformers": None,
        "env.python": "3",
        "env.kvbench": "1",
        "env.commit": "c",
    }
    bare = flat_row(metrics(oom=None, error=None, inter_token=None))
    assert "oom.bytes_asked" not in bare and bare["error"] is None and not [key for key in bare if "inter" in key]
    assert flat_row(metrics(error=""))["error"] is None


def test_nested_mappings_are_flattened_and_lists_left_out() -> None:
    assert flatten({"a": {"b": 1, "c": [1], "d": {}}, "e": None}, "p") == {"p.a.b": 1, "p.e": None}


def lines(path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, 1),
        ({"tokens_per_s": 81.0}, 2),
        ({"status": "error"}, 2),
        ({"run_id": "b" * 10 + "-" + "c" * 10}, 2),
        ({"mean": {"score": 0.5, "stderr": None, "n": 3, "vs_fp16": {"diff": 1.0, "stderr": None, "n": 1}}}, 1),
        ({"mean": {"score": 0.75, "stderr": None, "n": 3, "vs_fp16": None}}, 2),
    ],
)
def test_a_row_is_written_again_only_if_it_says_something_else(tmp_path, change, rows) -> None:
    logger = CsvLogger(tmp_path / "runs.csv")
    logger.finish(metrics())
    logger.finish(metrics(**change))
    assert len(lines(tmp_path / "runs.csv")) == 1 + rows


def test_columns_keep_their_order_and_new_ones_come_last(tmp_path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("note,run_id,status\nmine,x,ok\n")
    CsvLogger(path).finish(metrics())
    header, first, second = lines(path)
    assert header.startswith("note,run_id,status,time,") and header.endswith(",env.commit")
    assert first.startswith("mine,x,ok,") and second.startswith(",0123456789-0123456789,ok,")


class Failing(Logger):
    """A logger that fails at one of its calls."""

    def __init__(self, at: str) -> None:
        self.at, self.calls = at, []

    def _call(self, name: str, *values: Any) -> str:
        self.calls.append((name, *values))
        if name == self.at:
            raise ConnectionError("away\nsince noon")
        return "a place"

    def begin(self, rows: Any) -> None:
        self._call("begin", rows)

    def sample(self, row: Any) -> None:
        self._call("sample", row)

    def finish(self, metrics: Any) -> None:
        self._call("finish", metrics)

    def destination(self) -> str | None:
        return self._call("destination")


@pytest.mark.parametrize("at", ["begin", "sample", "finish", "destination", "never"])
def test_a_logger_that_failed_is_not_called_again(at: str) -> None:
    messages: list[str] = []
    inner = Failing(at)
    safe = Safe(inner, "csv", messages.append)
    assert not safe.failed
    for _ in range(2):
        safe.begin([1])
        safe.sample({"a": 1})
        safe.finish({"b": 2})
        place = safe.destination()
    calls = [("begin", [1]), ("sample", {"a": 1}), ("finish", {"b": 2}), ("destination",)]
    names = [name for name, *_ in calls]
    if at == "never":
        assert inner.calls == calls * 2 and place == "a place" and not safe.failed and messages == []
        return
    assert inner.calls == calls[: names.index(at) + 1] and place is None and safe.failed
    assert messages == [
        "logger csv failed (ConnectionError: away); the run continues and its results are on disk; run the same "
        "command again later to send them"
    ]


def test_a_logger_that_does_nothing_has_no_place_and_never_failed() -> None:
    logger = loggers.load_logger(type("NoLogger", (), {"name": "none"})(), "id", {}, "kivi", print)
    assert type(logger) is Logger and logger.destination() is None and not logger.failed
    named = type("Csv", (), {"name": "csv", "path": "x.csv"})()
    assert isinstance(loggers.load_logger(named, "id", {}, "kivi", print), Safe)
