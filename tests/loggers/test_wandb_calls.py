"""Calls of W&B, received by a module that stands in for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench import loggers
from kvbench.loggers.wandb import WandbLogger
from kvbench.loggers.wandb_service import distinct, plain_data


class Run:
    """A run of W&B that keeps what it is sent."""

    def __init__(self, step: int) -> None:
        self.step, self.logged, self.summary, self.ended = step, [], {}, []
        self.dir, self.url = "a folder/files", "an address"

    def log(self, values: Any, step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class Error(Exception):
    """W&B's own error."""


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    module: Any = SimpleNamespace(errors=SimpleNamespace(Error=Error), inits=[], runs=[], step=0, refuse=False)
    module.Settings = lambda **named: named
    module.Table = lambda columns, data: (columns, data)
    module.Histogram = lambda values, num_bins: values

    def init(**named: Any) -> Run:
        module.inits.append(named)
        if module.refuse and named["mode"] == "online":
            raise Error("no route\nto the host")
        module.runs.append(Run(module.step))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


CONFIG = {"model": {"name": "tiny"}, "dataset": {"name": "mini"}, "method": {"split": (1, 2)}}


def logger(tmp_path, said: list[str] | None = None, **changes: Any) -> WandbLogger:
    parts = {
        "project": "p",
        "entity": None,
        "group": None,
        "tags": ("a",),
        "mode": "offline",
        "dir": str(tmp_path / "w"),
    }
    say = (lambda line: None) if said is None else said.append
    return WandbLogger(SimpleNamespace(**parts | changes), "the id", CONFIG, "kivi int2", say)


def row(name: str, **changes: Any) -> dict[str, Any]:
    parts = {"id": name, "task": "t", "length": 64, "scores": {"score": 0.5}, "nll": {"sum": 2.0, "n": 1}}
    parts |= {
        "kv_bytes": {"used": {"total": 7 * 2**20}},
        "prompt_tokens": 9,
        "truncated": 0,
        "prediction": "x",
        "finish": "eos",
    }
    parts |= {"prompt_head": "h", "prompt_tail": "t", "reference": "r"}
    return {**parts, "measured": {"warm_up": False, "ttft_s": 0.25}, **changes}


METRICS: dict[str, Any] = {
    **{key: {} for key in ("mean", "samples", "peak_bytes", "ttft_s", "tpot_s", "attention", "env")},
    "scores": {"t@64": {"score": 0.5, "stderr": None}},
    "kv_bytes": {"used": {"total": 7 * 2**20}},
    "status": "ok",
    "tokens_per_s": 80.0,
    "error": None,
    "run_id": "the id",
    "baseline": "another",
}


def test_a_run_begins_with_its_settings(wandb, tmp_path) -> None:
    logger(tmp_path).sample(row("a"))
    (named,) = wandb.inits
    assert named == {
        "project": "p",
        "entity": None,
        "group": "tiny/mini",
        "job_type": "kivi",
        "tags": ["a", "kivi", "tiny", "mini"],
        "name": "kivi int2 tiny mini",
        "id": "the id",
        "dir": str(tmp_path / "w"),
        "mode": "offline",
        "config": {**CONFIG, "method": {"split": [1, 2]}},
        "reinit": "finish_previous",
        "resume": None,
        "settings": {"console": "off", "silent": True, "x_disable_stats": True, "init_timeout": 20.0},
    }
    assert (tmp_path / "w").is_dir()
    logger(tmp_path, mode="online", group="g", entity="e").sample(row("a"))
    named = wandb.inits[1]
    assert (named["resume"], named["group"], named["entity"]) == ("allow", "g", "e")
    assert "init_timeout" not in named["settings"]


def test_every_row_is_a_step_and_the_table_is_of_the_last(wandb, tmp_path) -> None:
    log = logger(tmp_path)
    stored = [row("a"), row("b")]
    log.begin(stored)
    log.sample(row("c", length=None, scores={}, nll=None, kv_bytes=None))
    log.finish(METRICS)
    (run,) = wandb.runs
    first = {
        "sample/t@64/score": 0.5,
        "sample/t@64/nll": 2.0,
        "sample/kv_MiB": 7,
        "sample/prompt_tokens": 9,
        "sample/ttft_ms": 250.0,
    }
    assert run.logged[:3] == [(0, first), (1, first), (2, {"sample/prompt_tokens": 9, "sample/ttft_ms": 250.0})]
    step, table = run.logged[3]
    columns, data = table["samples"]
    assert step == 2 and len(run.logged) == 4
    assert dict(zip(columns, data[0], strict=True)) == {
        "id": "a",
        "task": "t",
        "length": 64,
        "prompt_tokens": 9,
        "truncated": 0,
        "prompt_head": "h",
        "prompt_tail": "t",
        "prediction": "x",
        "reference": "r",
        "finish": "eos",
        "score": 0.5,
        "kv_MiB": 7,
        "peak_MiB/prefill": None,
        "peak_MiB/decode": None,
        "ttft_ms": 250.0,
        "tpot_ms": None,
        "tokens_per_s": None,
    }
    assert data[2][columns.index("score")] is None and len(stored) == 2
    assert run.summary == {
        "scores/t@64/score": 0.5,
        "kv_MiB/used/total": 7,
        "status": "ok",
        "tokens_per_s": 80.0,
        "run_id": "the id",
        "baseline": "another",
    }
    assert run.ended == [0] and len(wandb.inits) == 1


@pytest.mark.parametrize(("step", "steps"), [(0, [0, 1, 2]), (1, [1, 2]), (3, [])])
def test_a_resumed_run_is_sent_what_it_lacks(wandb, tmp_path, step, steps) -> None:
    wandb.step = step
    log = logger(tmp_path, mode="online")
    log.begin([row("a"), row("b"), row("c")])
    log.finish({**METRICS, "status": "interrupted"})
    assert [at for at, values in wandb.runs[0].logged if "samples" not in values] == steps
    assert wandb.runs[0].ended == [1]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("older", 0), ("oom", 0), ("error", 1), ("interrupted", 1)])
def test_a_result_ends_well_and_a_failure_does_not(wandb, tmp_path, status, code) -> None:
    logger(tmp_path).finish({**METRICS, "status": status})
    assert wandb.runs[0].ended == [code] and wandb.runs[0].logged == []


def test_a_warm_up_has_no_time_and_a_point_has_its_figures(wandb, tmp_path) -> None:
    log = logger(tmp_path)
    log.sample(row("a", measured={"warm_up": True, "ttft_s": 0.25}))
    point = {"status": "ok", "tpot_s": {"median": 0.5}, "batch": 4}
    log.sample(row("b", measured={"warm_up": False, "ttft_s": None, "point": point}))
    (_, first), (_, second) = wandb.runs[0].logged
    assert "sample/ttft_ms" not in first and "sample/ttft_ms" not in second
    assert second["sample/t@64/tpot_ms/median"] == 500 and second["sample/t@64/batch"] == 4
    assert "sample/t@64/status" not in second


def test_without_a_key_it_is_offline_and_says_so_once(wandb, tmp_path) -> None:
    messages: list[str] = []
    log = logger(tmp_path, messages, mode="auto")
    log.sample(row("a"))
    log.sample(row("b"))
    assert [named["mode"] for named in wandb.inits] == ["offline"] and len(messages) == 1
    assert messages[0].startswith("wandb: no API key is configured, so it runs offline; run `wandb sync ")
    assert log.destination() == f"wandb offline {tmp_path / 'w'} /p"
    logger(tmp_path, messages).sample(row("a"))
    assert len(messages) == 1, "offline was asked for"


def test_the_environment_decides_before_the_key(wandb, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    log = logger(tmp_path, mode="auto")
    assert log.destination() == "wandb online https://api.wandb.ai /p"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_BASE_URL", "https://mine")
    assert log.destination() == "wandb disabled https://mine /p"
    log.sample(row("a"))
    assert wandb.inits[0]["mode"] == "disabled"


def test_a_service_that_does_not_answer_is_left_unless_online_was_asked_for(wandb, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    wandb.refuse = True
    messages: list[str] = []
    log = logger(tmp_path, messages, mode="auto")
    log.sample(row("a"))
    assert [named["mode"] for named in wandb.inits] == ["online", "offline"]
    assert messages == ["wandb: not reachable (no route), so it runs offline"]
    assert log.destination() == f"wandb offline {tmp_path / 'w'} /p"
    with pytest.raises(Error):
        logger(tmp_path, messages, mode="online").sample(row("a"))
    assert len(wandb.inits) == 3


def test_plain_data_have_no_tuples() -> None:
    assert plain_data({1: ({"a": (1, 2)}, "text")}) == {"1": [{"a": [1, 2]}, "text"]}


def test_half_an_emoji_is_sent_as_an_escape(wandb, tmp_path) -> None:
    log = logger(tmp_path)
    log.sample(row("a", prediction="half \ud83d"))
    log.finish({**METRICS, "error": "\ud83d"})
    _, data = wandb.runs[0].logged[-1][1]["samples"]
    assert "half \\ud83d" in data[0] and wandb.runs[0].summary["error"] == "\\ud83d"


def test_times_of_a_sample_are_in_milliseconds_without_the_first_step(wandb, tmp_path) -> None:
    log = logger(tmp_path)
    measured = {"ttft_s": 0.5, "step_s": [0.4, 0.1, 0.3], "decoded": 3, "batch_rows": 2, "decode_s": 1.2}
    log.sample(row("a", measured={**measured, "peak_bytes": {"prefill": 3 * 2**20, "decode": None}}))
    ((_, values),) = wandb.runs[0].logged
    expected = {"ttft_ms": 500, "first_step_ms": 400, "tpot_ms": 200, "tokens_per_s": 5, "peak_MiB/prefill": 3}
    assert {name: values[f"sample/{name}"] for name in expected} == pytest.approx(expected)
    assert values["sample/inter_token_ms/histogram"] == pytest.approx([100, 300])
    assert "sample/peak_MiB/decode" not in values


def test_runs_of_a_sweep_have_its_group_and_tag(wandb, tmp_path) -> None:
    settings = logger(tmp_path).service.settings
    settings.name = "wandb"
    with loggers.in_sweep("today"):
        loggers.load_logger(settings, "id", CONFIG, "kivi int2", print).sample(row("a"))
    loggers.load_logger(settings, "id", CONFIG, "kivi int2", print).sample(row("a"))
    assert [named["group"] for named in wandb.inits] == ["sweep today", "tiny/mini"]
    assert wandb.inits[0]["tags"] == ["a", "kivi", "tiny", "mini", "sweep today"]


def test_tags_are_such_that_wandb_takes_them() -> None:
    assert distinct(["a", "", "b", "a", "c" * 100]) == ["a", "b", "c" * 64]
