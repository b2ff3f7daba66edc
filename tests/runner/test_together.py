"""Runs that share each prefill: their rows are those of single runs, whatever the methods keep of the prompt."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.config.run_config import RuntimeConfig, checked_config
from kvbench.decoding import shared_prefill as reading
from kvbench.errors import CacheError
from kvbench.methods.load import load_method
from kvbench.models import shared
from kvbench.models.load import load
from kvbench.models.spec import ModelConfig
from kvbench.results.identity import run_id
from kvbench.results.samples import MEASURED, DiskError, outputs
from kvbench.runner import shared_prefill
from kvbench.runner.resolve import material
from kvbench.runner.run import run
from kvbench.runner.together import refusal, run_together
from kvbench.util.schema import build
from tests.run_files import store_of
from tests.run_support import METHODS, config

OTHERS: dict[str, dict[str, Any]] = {
    "snapkv": {"_target_": "kvbench.methods.snapkv.SnapKV", "takes": ["none"], "budget": 24, "window": 8},
    "h2o": {"_target_": "kvbench.methods.h2o.H2O", "takes": ["none"], "budget": 24},
    "streamingllm": {"_target_": "kvbench.methods.streamingllm.StreamingLLM", "takes": ["none"], "budget": 22},
}


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_shelf", None)


def configs(folder: Path, **groups: Any) -> list[dict[str, Any]]:
    groups = {"dataset": {"limit": 3, "words": 16}, **groups}
    chosen = [config(folder, name, **copy.deepcopy(groups)) for name in METHODS]
    return chosen + [config(folder, "fp16", **copy.deepcopy(groups), method=method) for method in OTHERS.values()]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs between two repetitions: times, and the process's resident memory."""
    row = copy.deepcopy(row)
    measured = row[MEASURED]
    for name in ("ttft_s", "step_s", "capture_s", "shared_prefill"):
        measured.pop(name, None)
    measured.pop("peak_bytes")  # compared as that of the run: a process may hold a few bytes more
    return row


def rows_of(metrics: dict[str, Any]) -> dict[str, Any]:
    return store_of(metrics).samples().rows


@pytest.mark.parametrize(
    "groups",
    [
        {"runtime": {"batch_size": 3, "prefill_rows": 2}, "dataset": {"limit": 6, "words": 16}},
        pytest.param({"decoding": {"temperature": 1.0}}, marks=pytest.mark.slow),
        pytest.param({"runtime": {"prefill_chunk": 37}}, marks=pytest.mark.slow),
    ],
    ids=["groups of a padded batch", "sampled", "chunks"],
)
def test_five_methods_over_one_prefill_have_the_rows_of_single_runs(tmp_path: Path, groups: dict[str, Any]) -> None:
    together = run_together(configs(tmp_path / "together", **groups))
    for single, metrics in zip(configs(tmp_path / "alone", **groups), together, strict=True):
        assert isinstance(metrics, dict) and metrics["status"] == "ok"
        alone = run(single)
        assert metrics["run_id"] == alone["run_id"]
        mine, its = rows_of(metrics), rows_of(alone)
        assert list(mine) == list(its)
        for name, row in mine.items():
            assert outputs(row) == outputs(its[name])
            assert without_times(row) == without_times(its[name])
            assert "shared_prefill" not in its[name][MEASURED]
        marked = [row[MEASURED].get("shared_prefill") for row in mine.values()]
        warm = [row[MEASURED]["warm_up"] for row in mine.values()]
        assert [mark is None for mark in marked] == warm, "the first batch measures the prefill of each method"
        assert {mark["methods"] for mark in marked if mark} == {5}
        assert metrics["ttft_s"]["shared"] == metrics["ttft_s"]["n"] > 0
        assert alone["ttft_s"]["shared"] == 0
        assert metrics["peak_bytes"]["prefill"] == pytest.approx(alone["peak_bytes"]["prefill"], rel=1e-3)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of methods of each shared prefill."""
    counts: list[int] = []
    real = reading.read

    def read(model: Any, caches: Any, *args: Any, **more: Any) -> Any:
        counts.append(len(caches))
        return real(model, caches, *args, **more)

    monkeypatch.setattr(shared_prefill, "read", read)
    return counts


def few(folder: Path, limit: int = 3, **groups: Any) -> list[dict[str, Any]]:
    return configs(folder, dataset={"limit": limit, "words": 4, "new_tokens": 2}, **groups)[:3]


@pytest.mark.slow  # 2 s
def test_a_run_that_is_ahead_waits_for_the_others(tmp_path: Path, prefills: list[int]) -> None:
    runs = few(tmp_path)
    run({**runs[0], "dataset": {**runs[0]["dataset"], "limit": 1}})
    results = run_together(runs)
    assert [result["samples"]["done"] for result in results] == [3, 3, 3]  # type: ignore[index]
    assert prefills == [2, 3], "the last sample is the others' first but one, and the first run's own first but one"
    assert run_together(runs)[0]["status"] == "ok"  # type: ignore[index]
    assert len(prefills) == 2


def test_a_prefill_is_shared_by_runs_of_one_arithmetic(tmp_path: Path, prefills: list[int]) -> None:
    runs = few(tmp_path, model={"dtype": "auto"})
    for each, wanted in zip(runs, ("float32", "storage", "storage"), strict=True):
        first = {"dataset": {**each["dataset"], "limit": 1}, "runtime": {**each["runtime"], "arithmetic": wanted}}
        run({**each, **first})
    kinds = []
    for metrics in run_together(runs):
        assert isinstance(metrics, dict)
        kinds.append({row[MEASURED]["arithmetic"] for row in rows_of(metrics).values()})
    assert kinds == [{"float32"}, {"bfloat16"}, {"bfloat16"}]
    assert prefills == [2], "the last sample of those in 16 bits; the sample before warms up"


def test_what_cannot_share_runs_by_itself_and_says_why(tmp_path: Path, prefills: list[int], capsys: Any) -> None:
    runs = few(tmp_path)
    other = {**runs[1], "decoding": {"max_new_tokens": 1}}
    limited = {**runs[2], "runtime": {**runs[2]["runtime"], "memory_limit_gb": 64.0}}
    wrong = {**runs[2], "method": {**runs[2]["method"], "budget": -1}}
    ended: list[int] = []
    results = run_together([*runs[:2], other, limited, wrong, runs[0]], ended=lambda place, result: ended.append(place))
    printed = capsys.readouterr().err
    assert "kivi int2: does not share a prefill: its model, data or decoding options are others" in printed
    assert "snapkv: does not share a prefill: its memory is limited (runtime.memory_limit_gb)" in printed
    assert "fp16: does not share a prefill: the same run is among the others" in printed
    assert "method.budget" in str(results[4])
    assert [result["status"] for i, result in enumerate(results) if i != 4] == ["ok"] * 5  # type: ignore[index]
    assert prefills == [2, 2]
    assert sorted(ended) == list(range(6))


def test_a_run_whose_folder_cannot_be_made_is_the_only_one_that_fails(tmp_path: Path) -> None:
    runs = few(tmp_path)
    checked = checked_config(runs[1])
    folder = Path(checked.runtime.results_dir) / run_id(material(checked))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")
    results = run_together(runs)
    assert isinstance(results[1], DiskError)
    assert [result["status"] for result in results[::2]] == ["ok", "ok"]  # type: ignore[index]


def test_loggers_that_follow_one_run_at_a_time_are_refused(tmp_path: Path) -> None:
    reason = refusal(checked_config(config(tmp_path, logger={"name": "wandb", "project": "mine"})))
    assert reason is not None and reason.startswith("logger=wandb follows one run at a time")
    assert refusal(checked_config(config(tmp_path))) is None


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("cocktail", {}, None),
        ("atom", {}, None),
        ("atom", {"prefill": "quantized"}, "quantized keys and values"),
        ("kvquant", {}, "before RoPE"),
        ("quantspec", {}, "decodes speculatively"),
    ],
)
def test_methods_whose_prompt_depends_on_them_are_refused(method: str, options: dict, reason: str | None) -> None:
    told = reading.refusal(load_method(method, **options))
    assert told is None if reason is None else reason in str(told)


def test_prompts_go_to_the_host_or_are_read_singly_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefills: list[int], capsys: Any
) -> None:
    monkeypatch.setattr(shared_prefill, "memory", lambda device: 1e4)
    results = run_together(few(tmp_path))
    assert [result["status"] for result in results] == ["ok"] * 3  # type: ignore[index]
    assert prefills == []
    assert "each method reads the prompt by itself: 0.0 GiB of keys and values would have to be kept" in (
        capsys.readouterr().err
    )
    free = {"cuda": 1e4, "cpu": 1e12}
    monkeypatch.setattr(shared_prefill, "memory", lambda device: free[device.type])
    monkeypatch.setattr(shared_prefill, "predicted", lambda strategies, batch: (10**6, 10**6))
    loaded = type("Loaded", (), {"device": torch.device("cuda", 0)})()
    strategy: Any = type("Strategy", (), {"loaded": loaded})()
    assert shared_prefill.place([strategy], None) == (torch.device("cpu"), "")  # type: ignore[arg-type]
    free["cuda"] = 1e7
    assert shared_prefill.place([strategy], None) == (None, "")  # type: ignore[arg-type]


def test_memory_that_runs_out_in_the_shared_prefill_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def read(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(shared_prefill, "read", read)
    results = run_together(few(tmp_path))
    assert [result["status"] for result in results] == ["ok"] * 3  # type: ignore[index]
    assert "out of memory in the shared prefill" in capsys.readouterr().err


def test_an_error_in_one_method_is_that_methods_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.methods.kivi import Kivi

    real = Kivi.place

    def place(self: Any, layer: Any, rows: Any, keys: Any, *more: Any) -> None:
        if layer.index and keys.shape[2] % 2:
            raise ValueError("an odd prompt")
        real(self, layer, rows, keys, *more)

    monkeypatch.setattr(Kivi, "place", place)
    results = run_together(few(tmp_path, 4))
    assert [result["status"] for result in results] == ["ok", "error", "ok"]  # type: ignore[index]
    assert "an odd prompt" in results[1]["error"]  # type: ignore[index]
    assert [result["samples"]["done"] for result in results][::2] == [4, 4]  # type: ignore[index]


def test_an_interruption_ends_all_and_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = shared_prefill.rows, []

    def rows(sessions: Any, samples: Any) -> Any:
        calls.append(len(sessions))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(sessions, samples)

    monkeypatch.setattr(shared_prefill, "rows", rows)
    runs = few(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_together(runs)
    stored = [json.loads(path.read_text()) for path in tmp_path.glob("*/metrics.json")]
    assert [(metrics["status"], metrics["samples"]["done"]) for metrics in stored] == [("interrupted", 2)] * 3
    monkeypatch.setattr(shared_prefill, "rows", real)
    assert [result["samples"]["done"] for result in run_together(runs)] == [3, 3, 3]  # type: ignore[index]


def test_a_prompt_fills_only_the_caches_that_it_was_read_for(tmp_path: Path) -> None:
    toy = build(ModelConfig, config(tmp_path)["model"], "model")
    model = load(toy, RuntimeConfig(device="cpu")).model
    ids = torch.arange(20)[None]
    prompts = Prompts.from_batch(ids)
    caches: list[KVCache] = [load_method("fp16").new_cache(model, prompts) for _ in range(2)]
    prompt = reading.read(model, caches, prompts, ids, None)
    assert prompt.nbytes(torch.device("cpu")) == 2 * 2 * 20 * 32 * 4
    prompt.fill(caches[0])
    for cache in (caches[0], load_method("fp16").new_cache(model, prompts)):
        with pytest.raises(CacheError, match="fills each of the caches that it was made for once"):
            prompt.fill(cache)
    with pytest.raises(CacheError, match="cannot share a prefill: its prompt attends to quantized"):
        reading.read(model, [load_method("atom", prefill="quantized").new_cache(model, prompts)], prompts, ids, None)
