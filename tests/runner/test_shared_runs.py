"""Runs that share each prefill: their rows are those of single runs, whatever the methods keep of the prompt."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.config.run_config import RuntimeConfig, checked_config
from kvbench.decoding import shared_prefill as reading
from kvbench.errors import CacheError, ConfigError
from kvbench.methods.load import load_method
from kvbench.models import shared
from kvbench.models.load import load_model
from kvbench.models.spec import ModelConfig
from kvbench.results.identity import run_id
from kvbench.results.samples import MEASURED, DiskError, outputs
from kvbench.runner import shared_runs
from kvbench.runner.resolve import material
from kvbench.runner.run import answer_run
from kvbench.runner.shared_runs import run_sharing_refusal, run_together
from kvbench.util.schema import build
from tests.run_files import store_of
from tests.run_support import ARCHITECTURE, METHODS, config

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
    """A row without what differs between two repetitions: times, the process's resident memory, the code of sharing."""
    row = copy.deepcopy(row)
    measured = row[MEASURED]
    for name in ("ttft_s", "step_s", "capture_s", "shared_prefill"):
        measured.pop(name, None)
    measured["code"].pop("runner/shared_runs", None)
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
        alone = answer_run(single)
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
    real = reading.read_prompts

    def read(model: Any, caches: Any, *args: Any, **more: Any) -> Any:
        counts.append(len(caches))
        return real(model, caches, *args, **more)

    monkeypatch.setattr(shared_runs, "read_prompts", read)
    return counts


def few(folder: Path, limit: int = 3, **groups: Any) -> list[dict[str, Any]]:
    return configs(folder, dataset={"limit": limit, "words": 4, "new_tokens": 2}, **groups)[:3]


@pytest.mark.slow  # 2 s
def test_a_run_that_is_ahead_waits_for_the_others(tmp_path: Path, prefills: list[int]) -> None:
    runs = few(tmp_path)
    answer_run({**runs[0], "dataset": {**runs[0]["dataset"], "limit": 1}})
    results = run_together(runs)
    assert [result["samples"]["done"] for result in results] == [3, 3, 3]  # type: ignore[index]
    assert prefills == [2, 3], "the last sample is the others' first but one, and the first run's own first but one"
    assert run_together(runs)[0]["status"] == "ok"  # type: ignore[index]
    assert len(prefills) == 2


def test_a_prefill_is_shared_by_runs_of_one_arithmetic(tmp_path: Path, prefills: list[int]) -> None:
    runs = few(tmp_path, model={"dtype": "auto"})
    for each, wanted in zip(runs, ("float32", "storage", "storage"), strict=True):
        first = {"dataset": {**each["dataset"], "limit": 1}, "runtime": {**each["runtime"], "arithmetic": wanted}}
        answer_run({**each, **first})
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
    reason = run_sharing_refusal(checked_config(config(tmp_path, logger={"name": "wandb", "project": "mine"})))
    assert reason is not None and reason.startswith("logger=wandb follows one run at a time")
    assert run_sharing_refusal(checked_config(config(tmp_path))) is None


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
    told = reading.sharing_refusal(load_method(method, **options))
    assert told is None if reason is None else reason in str(told)


def test_prompts_go_to_the_host_or_are_read_singly_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefills: list[int], capsys: Any
) -> None:
    monkeypatch.setattr(shared_runs, "unused_memory", lambda device: 1e4)
    results = run_together(few(tmp_path))
    assert [result["status"] for result in results] == ["ok"] * 3  # type: ignore[index]
    assert prefills == []
    assert "each method reads the prompt by itself: 0.0 GiB of keys and values would have to be kept" in (
        capsys.readouterr().err
    )
    free = {"cuda": 1e4, "cpu": 1e12}
    monkeypatch.setattr(shared_runs, "unused_memory", lambda device: free[device.type])
    monkeypatch.setattr(shared_runs, "predicted_bytes", lambda strategies, batch: (10**6, 10**6))
    loaded = type("Loaded", (), {"device": torch.device("cuda", 0)})()
    strategy: Any = type("Strategy", (), {"loaded": loaded})()
    assert shared_runs.choose_home([strategy], None) == (torch.device("cpu"), "")  # type: ignore[arg-type]
    free["cuda"] = 1e7
    assert shared_runs.choose_home([strategy], None) == (None, "")  # type: ignore[arg-type]


def test_memory_that_runs_out_in_the_shared_prefill_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def read(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(shared_runs, "read_prompts", read)
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
    real, calls = shared_runs.shared_rows, []

    def rows(sessions: Any, samples: Any) -> Any:
        calls.append(len(sessions))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(sessions, samples)

    monkeypatch.setattr(shared_runs, "shared_rows", rows)
    runs = few(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_together(runs)
    stored = [json.loads(path.read_text()) for path in tmp_path.glob("*/metrics.json")]
    assert [(metrics["status"], metrics["samples"]["done"]) for metrics in stored] == [("interrupted", 2)] * 3
    monkeypatch.setattr(shared_runs, "shared_rows", real)
    assert [result["samples"]["done"] for result in run_together(runs)] == [3, 3, 3]  # type: ignore[index]


def test_a_prompt_fills_only_the_caches_that_it_was_read_for(tmp_path: Path) -> None:
    toy = build(ModelConfig, config(tmp_path)["model"], "model")
    model = load_model(toy, RuntimeConfig(device="cpu")).model
    ids = torch.arange(20)[None]
    prompts = Prompts.from_batch(ids)
    caches: list[KVCache] = [load_method("fp16").new_cache(model, prompts) for _ in range(2)]
    prompt = reading.read_prompts(model, caches, prompts, ids, None)
    assert prompt.nbytes(torch.device("cpu")) == 2 * 2 * 20 * 32 * 4
    prompt.fill(caches[0])
    for cache in (caches[0], load_method("fp16").new_cache(model, prompts)):
        with pytest.raises(CacheError, match="fills each of the caches that it was made for once"):
            prompt.fill(cache)
    with pytest.raises(CacheError, match="cannot share a prefill: its prompt attends to quantized"):
        reading.read_prompts(
            model, [load_method("atom", prefill="quantized").new_cache(model, prompts)], prompts, ids, None
        )


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        ({"workers": 2}, "several processes"),
        ({"tensor_parallel": 2}, "several processes"),
        ({"memory_limit_gb": 4.0}, "memory_limit_gb"),
        ({"batch_size": 3, "prefill_chunk": 16}, None),
    ],
)
def test_runs_of_several_processes_or_of_limited_memory_are_refused(
    tmp_path: Path, runtime: dict[str, Any], reason: str | None
) -> None:
    checked = checked_config(config(tmp_path))
    told = run_sharing_refusal(dataclasses.replace(checked, runtime=dataclasses.replace(checked.runtime, **runtime)))
    assert told is None if reason is None else reason in str(told)


@pytest.mark.parametrize("name", ["adaptive", "times_only", "single_process"])
def test_data_that_measure_times_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    checked = checked_config(config(tmp_path))
    monkeypatch.setattr(type(checked.task), name, True)
    assert run_sharing_refusal(checked) == "its data set measures time and memory"


def test_an_error_of_one_configuration_is_its_own_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, str]] = []
    ended: list[int] = []

    def single(given: Any, start: Any) -> Any:
        start("an-id")
        raise ValueError("bad data")

    monkeypatch.setattr(shared_runs, "answer_run", single)
    wrong = config(tmp_path, runtime={"batch_size": 0})
    results = run_together(
        [wrong, config(tmp_path)], lambda *said: begun.append(said), lambda place, result: ended.append(place)
    )
    assert isinstance(results[0], ConfigError) and str(results[1]) == "bad data"
    assert begun == [(1, "an-id")] and ended == [0, 1]


class Strategy:
    """What a forecast of a shared prefill reads of a method: two layers, two heads, one of them of keys and values."""

    def __init__(self, observed: int = 0, device: str = "meta", width: torch.dtype = torch.bfloat16) -> None:
        shape = SimpleNamespace(layers=2, kv_heads=1, head_dim=32, heads=2, hidden_size=64)
        text = SimpleNamespace(get_text_config=lambda decoder: {**ARCHITECTURE, "num_experts": 8})
        self.loaded = SimpleNamespace(
            architecture=shape,
            dtype=width,
            storage=torch.bfloat16,
            model=SimpleNamespace(config=text),
            device=torch.device(device),
        )
        runtime = SimpleNamespace(prefill_chunk=None, prefill_rows=None, mlp_chunk=None)
        self.config = SimpleNamespace(runtime=runtime, method=SimpleNamespace(observe_prompt=observed))


BATCH = SimpleNamespace(input_ids=torch.zeros(3, 100, dtype=torch.long), new_tokens=28)


def test_the_memory_of_a_shared_prefill_by_hand() -> None:
    def of(*strategies: Strategy) -> tuple[int, int]:
        return shared_runs.predicted_bytes(strategies, BATCH)  # type: ignore[arg-type]

    token = 2 * 2 * 3 * 1 * 32 * 2  # keys and values, two layers, three prompts, 32 channels of 16 bits
    alive = 20 * 64 * 3 * 100 * 2  # of a mixture of experts, whose passes are not known
    assert of(Strategy()) == (token * 100, alive)
    assert of(Strategy(width=torch.float32)) == (token * 100, 2 * alive)
    scores = 2 * 3 * 2 * 100 * 4  # float32 of every layer, prompt, head and token
    assert of(Strategy(), Strategy(8), Strategy(-3)) == (token * 100 + 11 * scores, alive)
    longer = SimpleNamespace(input_ids=BATCH.input_ids, new_tokens=10_000)
    assert shared_runs.predicted_bytes([Strategy()], longer)[1] == token * 10_100  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize(
    ("device", "free", "host", "home", "fits"),
    [
        ("meta", 1.0, 0.0, None, True),
        ("meta", 0.99, 1.0, "cpu", True),
        ("meta", 0.0, 0.99, None, False),
        ("meta", 0.0, None, "cpu", True),
        ("meta", None, 0.0, None, True),
        ("cpu", 0.0, 0.0, None, False),
    ],
)
def test_the_prompts_of_a_shared_prefill_stay_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, device: str, free: float | None, host: float | None, home: str | None, fits: bool
) -> None:
    """`free` and `host` are shares of what is needed there."""
    strategies: Any = [Strategy(device=device)]
    kept, working = shared_runs.predicted_bytes(strategies, BATCH)  # type: ignore[arg-type]
    rooms = {
        "meta": free and free * (kept + working + 1) / shared_runs.SHARE,
        "cpu": host and host * (kept + 1) / shared_runs.SHARE,
    }
    monkeypatch.setattr(shared_runs, "unused_memory", lambda place: rooms[place.type])
    where, reason = shared_runs.choose_home(strategies, BATCH)  # type: ignore[arg-type]
    assert where == (home and torch.device(home)) and (reason == "") == fits
    if not fits:
        assert f"0.0 GiB free on {device}" in reason


def test_free_memory_is_that_of_the_gpu_or_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_runs, "free_bytes", lambda device, limit: {("cuda", None): 5.0}[device.type, limit])
    monkeypatch.setattr(shared_runs, "free_memory", lambda: 7.0)
    assert [shared_runs.unused_memory(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")] == [5.0, 5.0, 7.0]


class Cache:
    """Keys and values of nothing."""


class Shares:
    """A session and its strategy, of which one step may fail."""

    def __init__(self, name: str, fails: str = "") -> None:
        self.name, self.fails, self.loaded = name, fails, SimpleNamespace(device="cpu")

    def answers(self) -> Shares:
        return self

    def _step(self, step: str, result: Any) -> Any:
        if self.fails == step:
            raise ValueError(f"{step} of {self.name}")
        return result

    def batch(self, samples: Any) -> Any:
        return self._step("batch", "batch")

    def cache(self, batch: Any) -> Any:
        return self._step("cache", Cache())

    def answered(self, batch: Any, cache: Any, *, first: bool, prompt: Any) -> Any:
        assert batch == "batch" and first is False and isinstance(cache, Cache) and prompt.caches.count(cache) == 1
        return self._step("answer", [self.name])


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Caches that were dropped from a shared prefill, which is made up."""
    dropped: list[Any] = []

    def read(strategy: Any, caches: Any, batch: Any, home: Any) -> Any:
        strategy._step("read", None)
        return SimpleNamespace(caches=caches, forget=dropped.append)

    monkeypatch.setattr(shared_runs, "KVCache", Cache)
    monkeypatch.setattr(shared_runs, "choose_home", lambda strategies, batch: (None, ""))
    monkeypatch.setattr(shared_runs, "_read_shared", read)
    return dropped


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("", "", ""), [["a"], ["b"], ["c"]]),
        (("", "cache", ""), [["a"], "cache of b", ["c"]]),
        (("cache", "", ""), ["cache of a", ["b"], ["c"]]),
        (("", "answer", ""), [["a"], "answer of b", ["c"]]),
        (("batch", "", ""), ["batch of a"] * 3),
        (("read", "", "cache"), ["read of a", "read of a", "cache of c"]),
    ],
)
def test_an_error_in_a_shared_prefill_is_that_of_the_methods_it_stops(
    forgotten: list[Any], steps: tuple[str, ...], expected: list[Any]
) -> None:
    sessions: Any = [Shares(*pair) for pair in zip("abc", steps, strict=True)]
    results = shared_runs._shared_results(sessions, [SimpleNamespace(id="sample")])  # type: ignore[list-item]
    assert [str(result) if isinstance(result, Exception) else result for result in results] == expected
    answering = [step not in ("cache",) for step in steps] if steps[0] not in ("batch", "read") else []
    assert len(forgotten) == sum(answering), "keys and values are held no longer than needed"
