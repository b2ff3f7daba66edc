"""The content of `metrics.json` from rows by hand: what counts, on which device, by which code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.results import summary
from kvbench.results.code import code_digest
from kvbench.results.store import RunStore
from tests.run_support import config

CODE = {"method": "m" * 12, "cache": "c" * 12, "scorer": "s" * 12}


def row(name: str, device: str = "A", ttft_s: float = 1.0, path: str = "reference", **changes: Any) -> dict[str, Any]:
    parts = {"total": 40, "codes": 10, "scales": 10, "window": 10, "index": 10}
    measured = {
        "device": device,
        "dtype": "bfloat16",
        "warm_up": False,
        "batch_rows": 1,
        "ttft_s": ttft_s,
        "step_s": [0.5, 0.25],
        "decoded": 2,
        "peak_bytes": {"prefill": 7, "decode": 5, "kind": "cuda_allocator", "rss": 9},
        "attention": {"reads_packed": path == "triton", "path": path},
        "code": CODE,
    }
    return {
        "id": name,
        "task": "t",
        "length": None,
        "prompt_tokens": 10,
        "truncated": 0,
        "prediction": "",
        "scores": {"score": 0.5},
        "scorer_version": 1,
        "nll": None,
        "kv_bytes": {"used": parts, "reserved": parts, "fp16_equivalent": 80},
        "measured": measured,
        **changes,
    }


def build(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    store = RunStore(folder, "0123456789-aaaaaaaaaa")
    parts: dict[str, Any] = {
        "status": "ok",
        "rows": rows,
        "requested": 4,
        "task_version": 3,
        "environment": {"cpu": "c"},
    }
    return summary.build(store, config(folder, runtime={"batch_size": 2, "seed": 7}), **parts | changes)


def test_warm_up_samples_count_for_the_peak_alone(tmp_path: Path) -> None:
    warm = row("w", warm_up=True, scores={"score": 1.0}, prompt_tokens=99)
    warm["measured"]["peak_bytes"]["prefill"] = 70
    computed = build(tmp_path, [warm, row("a"), row("b", truncated=3, prompt_tokens=20)], left_out=["z"])
    assert computed["peak_bytes"]["prefill"] == 70 and computed["scores"]["t"]["score"] == 0.5
    assert computed["samples"] == {
        "requested": 4,
        "done": 2,
        "truncated": 1,
        "left_out": ["z"],
        "prompt_tokens": {"mean": 15.0, "max": 20},
    }
    assert computed["code"] == {code_digest(CODE): 2} and computed["scores"]["t"]["version"] == 3
    nothing = build(tmp_path, [])["samples"]
    assert nothing["prompt_tokens"] == {"mean": None, "max": None} and nothing["done"] == 0


@pytest.mark.parametrize(("device", "ttft_s"), [(None, 2.0), ("A", 1.0), ("B", 2.0), ("C", 2.0)])
def test_times_are_of_the_named_device_or_of_that_with_most_samples(tmp_path: Path, device, ttft_s) -> None:
    rows = [row("a"), row("b", "B", 2.0), row("c", "B", 2.0)]
    computed = build(tmp_path, rows, device=device)
    assert computed["ttft_s"]["median"] == ttft_s and set(computed["timings"]) == {"A", "B"}
    assert (computed["tpot_s"]["median"], computed["tokens_per_s"]) == (0.25, pytest.approx(2 / 0.75))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["reference"], (False, "reference")),
        (["triton", "none", "sdpa+reference"], (True, "reference+sdpa+triton")),
        (["none"], (False, "none")),
    ],
)
def test_paths_of_attention_are_joined(tmp_path: Path, paths, expected) -> None:
    computed = build(tmp_path, [row(str(number), path=path) for number, path in enumerate(paths)])["attention"]
    assert (computed["reads_packed"], computed["path"]) == expected
    bare = row("a")
    bare["measured"]["attention"] = None
    assert build(tmp_path, [bare])["attention"] == {"reads_packed": None, "path": None}


def test_the_configuration_that_tables_show(tmp_path: Path) -> None:
    computed = build(tmp_path, [row("a")], data={"identity": {"x": 1}})
    settings = config(tmp_path)
    assert computed["config"] == {
        "model": "toy",
        "method": settings["method"],
        "quantizer": "int2",
        "formats": {"key": settings["quantizer"]["key"], "value": settings["quantizer"]["value"]},
        "dataset": "toy",
        "decoding": {},
        "seed": 7,
        "batch_size": 2,
    }
    assert (computed["run_id"], computed["label"], computed["env"]["cpu"]) == (
        "0123456789-aaaaaaaaaa",
        "kivi int2",
        "c",
    )
    assert computed["data"] == {"identity": {"x": 1}} and build(tmp_path, [row("a")])["data"] is None


def test_failures_are_recorded_and_the_last_one_is_the_message(tmp_path: Path) -> None:
    errors = [{"sample": name, "type": "E", "message": f"of {name}", "traceback": ""} for name in "ab"]
    oom = {"bytes_asked": 5, "sample": None, "message": "full", "code": CODE}
    computed = build(tmp_path, [], status="oom", errors=errors, oom=oom)
    assert (computed["status"], computed["error"], computed["oom"]["bytes_asked"]) == ("oom", "of b", 5)
    assert [error["sample"] for error in computed["errors"]] == ["a", "b"]
    fine = build(tmp_path, [row("a")])
    assert (fine["error"], fine["errors"], fine["oom"]) == (None, [], None)


@pytest.mark.parametrize(
    ("now", "status", "older"),
    [
        (None, "ok", None),
        (CODE, "ok", None),
        ({**CODE, "scorer": "t" * 12}, "ok", None),
        ({**CODE, "cache": "d" * 12}, "older", {"samples": 1, "parts": ["cache"]}),
    ],
)
def test_a_run_of_older_code_is_older(tmp_path: Path, now, status, older) -> None:
    computed = build(tmp_path, [row("a")], code=now)
    assert (computed["status"], computed["older"]) == (status, older)
    assert build(tmp_path, [row("a")], code=now, status="interrupted")["status"] == "interrupted"


def test_the_code_of_memory_that_ran_out_counts_too(tmp_path: Path) -> None:
    now = {**CODE, "cache": "d" * 12}
    older = summary.older_code({}, {}, {"code": {**CODE, "method": "n" * 12}}, now)
    assert older == {"samples": 0, "parts": ["method", "cache"]}
    assert summary.older_code({}, {}, {"code": now}, now) is None and summary.older_code({}, {}, None, now) is None
    counts, parts = {"x": 2}, {"x": {"cache": "e" * 12}}
    both = summary.older_code(counts, parts, {"code": {**CODE, "method": "n" * 12}}, now)
    assert both == {"samples": 2, "parts": ["method", "cache"]}


def test_a_pair_with_fp16_brings_its_points_and_speed_ups(monkeypatch):
    def entry(diff, **more):
        pair = {"diff": diff, "stderr": 0.1, "n": 2}
        return {"score": 0.5, "stderr": 0.1, "n": 2, "vs_fp16": pair, "nll": None, "perplexity": None, **more}

    paired = {"a": entry(0.25, points={"batches": {}}, nll={"vs_fp16": {"diff": 1.0}}), "b": entry(0.0, nll={})}
    monkeypatch.setattr(summary.aggregate, "scores", lambda counted, rows: paired)
    monkeypatch.setattr(summary, "unlike", lambda counted, rows: ["cache"])
    told = []
    monkeypatch.setattr(summary, "add_speedups", lambda metrics, base: told.append(base))
    old = {**entry(None), "vs_fp16": None}
    given = {"a": {**old, "nll": {"mean": 2.0}}, "b": {**old, "points": 1}, "c": {**old, "points": 2}}
    metrics = {"scores": {name: dict(one) for name, one in given.items()}, "speculation": {"rounds": 1}}
    base = SimpleNamespace(run_id="x-fp16", metrics=lambda: {"run_id": "x-fp16"})
    summary._add_pairs(metrics, [], base, {})
    scores = metrics["scores"]
    assert [scores[name]["vs_fp16"] and scores[name]["vs_fp16"]["diff"] for name in "abc"] == [0.25, 0.0, None]
    assert scores["a"]["points"] == {"batches": {}} and (scores["b"]["points"], scores["c"]["points"]) == (1, 2)
    assert scores["a"]["nll"] == {"mean": 2.0, "vs_fp16": {"diff": 1.0}} and scores["b"]["nll"] is None
    assert (metrics["baseline"], metrics["baseline_differs"]) == ("x-fp16", ["cache"])
    assert told == [{"run_id": "x-fp16"}]
    summary._add_pairs({**metrics, "speculation": None}, [], base, {})
    assert len(told) == 1, "nothing is sped up without speculation"
