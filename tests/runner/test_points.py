"""Points of time and memory as rows: how a meter is set, and what a row keeps of its figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.cache.progress import Options
from kvbench.config.run_config import DecodingConfig, RuntimeConfig
from kvbench.measure.meter import How
from kvbench.results.samples import MEASURED
from kvbench.runner import points
from kvbench.runner.points import Points
from kvbench.runner.rows import Machine
from kvbench.tasks.base import Sample
from kvbench.tasks.efficiency import Efficiency
from kvbench.tasks.work import MeasurePoint

FIGURES = {
    "status": "ok",
    "prompt": 32,
    "batch": 4,
    "new_tokens": 8,
    "kv_used": {"codes": 60, "window": 23, "total": 83},
    "kv_reserved": {"codes": 60, "window": 40, "total": 100},
    "kv_fp16": 161,
    "peak": {"prefill": 7, "decode": 5},
    "reads_packed": True,
    "path": "triton",
}


def sample(prompt: int = 32, batch: int = 4) -> Sample:
    settings = {"repeats": 2, "warm_up": 5, "seed": 6, "untimed": 1, "compare": 3, "stock": ("static",)}
    work = MeasurePoint(prompt, batch, fill="random", **settings)
    return Sample(id=f"p@{prompt}/b{batch}", task="p", prompt="", answers=(), max_new_tokens=8, work=work)


def run(monkeypatch, *samples: Sample, figures=None, max_length=40, new_tokens=None, **runtime: Any) -> Any:
    """The rows of a batch of points, the meters that were made, and the points that they measured."""
    made: list[tuple[Any, ...]] = []
    measured: list[tuple[int, int]] = []

    class Meter:
        def __init__(self, *args: Any) -> None:
            made.append(args)

        def point(self, prompt: int, batch: int) -> dict[str, Any]:
            measured.append((prompt, batch))
            return dict(figures or {**FIGURES, "prompt": prompt, "batch": batch})

    states = iter(f"state {number}" for number in range(100))
    monkeypatch.setattr(points, "machine_state", lambda device: f"{device}, {next(states)}")
    monkeypatch.setattr(points, "Meter", Meter)
    loaded: Any = SimpleNamespace(model="model", tokenizer="tokenizer", max_length=max_length, device="cpu")
    strategy = Points(
        "method",  # type: ignore[arg-type]
        DecodingConfig(max_new_tokens=new_tokens, temperature=0.5, top_p=0.75),
        RuntimeConfig(**runtime),
        loaded,
        Efficiency(),
        Machine("a cpu", "float32"),
        Options(kernels="reference"),
    )
    rows = strategy.rows(samples, first=True, report=None)
    return SimpleNamespace(rows=rows, meters=made, measured=measured)


def test_one_meter_measures_all_points_with_the_settings_of_the_run(monkeypatch) -> None:
    done = run(monkeypatch, sample(), sample(64, 2), prefill_chunk=16, prefill_rows=3, compile=True, max_length=99)
    assert done.measured == [(32, 4), (64, 2)]
    ((model, tokenizer, method, how),) = done.meters
    assert (model, tokenizer, method) == ("model", "tokenizer", "method")
    assert how == How(
        new_tokens=8,
        repeats=2,
        untimed=1,
        warm_up=5,
        seed=6,
        graphs="always",
        compile=True,
        prefill_chunk=16,
        prefill_rows=3,
        temperature=0.5,
        top_p=0.75,
        fill="random",
        compare=3,
        stock=("static",),
        options=Options(kernels="reference"),
    )


@pytest.mark.parametrize(("graphs", "measured"), [("auto", "always"), ("always", "always"), ("never", "never")])
def test_steps_are_captured_however_short_the_answer_unless_never(monkeypatch, graphs, measured) -> None:
    assert run(monkeypatch, sample(), graphs=graphs).meters[0][3].graphs == measured


def test_the_runs_own_number_of_new_tokens_goes_before_the_data_sets(monkeypatch) -> None:
    assert run(monkeypatch, sample(), new_tokens=3).meters[0][3].new_tokens == 3


def test_the_row_of_a_point(monkeypatch) -> None:
    (row,) = run(monkeypatch, sample()).rows
    assert row == {
        "id": "p@32/b4",
        "task": "p",
        "length": None,
        "prompt_tokens": 32,
        "truncated": 0,
        "prediction": "",
        "tokens": [],
        "finish": "length",
        "status": "ok",
        "scores": {},
        "scorer_version": 1,
        "nll": None,
        "kv_bytes": {
            "used": {"codes": 15, "window": 5, "total": 20},
            "reserved": {"codes": 15, "window": 10, "total": 25},
            "fp16_equivalent": 40,
        },
        MEASURED: {
            "device": "a cpu",
            "dtype": "float32",
            "arithmetic": "float32",
            "warm_up": False,
            "batch_rows": 4,
            "ttft_s": None,
            "step_s": [],
            "decoded": 0,
            "peak_bytes": {"prefill": 7, "decode": 5},
            "attention": {"reads_packed": True, "path": "triton"},
            "point": FIGURES,
            "machine": {"before": "cpu, state 0", "after": "cpu, state 1"},
        },
    }


def test_a_point_that_did_not_fit_has_neither_bytes_nor_attention(monkeypatch) -> None:
    failed = {"status": "oom", "prompt": 32, "batch": 4, "new_tokens": 8, "bytes_asked": 77, "phase": "prefill"}
    (row,) = run(monkeypatch, sample(), figures=failed).rows
    assert (row["finish"], row["status"], row["kv_bytes"]) == ("oom", "oom", None)
    assert row[MEASURED]["attention"] is None and row[MEASURED]["peak_bytes"] is None
    assert row[MEASURED]["point"] == failed


@pytest.mark.parametrize(("max_length", "beyond"), [(40, None), (39, 39)])
def test_a_point_beyond_the_models_context_says_so(monkeypatch, max_length, beyond) -> None:
    (row,) = run(monkeypatch, sample(), max_length=max_length).rows
    assert row[MEASURED]["point"].get("beyond") == beyond


def test_a_methods_note_is_the_rows_and_not_a_figure(monkeypatch) -> None:
    (row,) = run(monkeypatch, sample(), figures={**FIGURES, "note": {"chunks": 3}}).rows
    assert row["method"] == {"chunks": 3} and row[MEASURED]["point"] == FIGURES
    assert "method" not in run(monkeypatch, sample()).rows[0]
