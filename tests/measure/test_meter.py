"""Runs of dataset=efficiency on a random two-layer model: rows, memory that ends, resume, what must be refused."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
import yaml

import kvbench.measure.meter as measuring
from kvbench.cli.report import main as report
from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.round_times import Round
from kvbench.errors import ConfigError
from kvbench.loggers.csv import flat_row
from kvbench.measure.meter import How, Meter
from kvbench.measure.point_figures import point_times, predicted_point, weight_bytes
from kvbench.methods.load import load_method
from kvbench.models.load import byte_tokenizer
from kvbench.results import tables
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from kvbench.util.confdir import group_options
from tests.run_files import validate
from tests.run_support import ARCHITECTURE, METHODS, config

GRID = {"prompts": [48, 32], "batches": [1, 2, 4], "new_tokens": 4, "repeats": 2, "warm_up": 2}


def settings(folder, name="kivi", /, grid=None, **groups):
    settings = config(folder, name, **groups)
    settings["dataset"] = {
        "_target_": "kvbench.tasks.efficiency.Efficiency",
        "name": "efficiency",
        **GRID,
        **(grid or {}),
    }
    return settings


def rows_of(metrics: dict) -> dict:
    return RunStore(Path(metrics["run_dir"]).parent, metrics["run_id"]).samples().rows


@pytest.fixture
def small(monkeypatch):
    """Memory that holds so many sequences: ``small(3)``; what was generated is written down."""
    calls: list[tuple[int, int, int]] = []
    generate = measuring.generate

    def limited(room):
        def fake(model, cache, ids, **options):
            calls.append((ids.shape[1], ids.shape[0], options["max_new_tokens"]))
            if ids.shape[0] > room:
                options["observer"].phase("prefill")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
            return generate(model, cache, ids, **options)

        monkeypatch.setattr(measuring, "generate", fake)
        return calls

    return limited


def test_a_row_for_every_point_with_what_it_took(tmp_path):
    metrics = answer_run(settings(tmp_path))
    content = json.loads((Path(metrics["run_dir"]) / "metrics.json").read_text())
    validate(content)
    rows = rows_of(metrics)
    assert list(rows) == [f"efficiency@{p}/b{b}" for p in (48, 32) for b in (1, 2, 4)]
    for row in rows.values():
        point = row["measured"]["point"]
        assert row["status"] == point["status"] == "ok" and row["scores"] == {} and row["tokens"] == []
        assert point["tpot_s"]["n"] == 2 and point["repeats"] == 2  # four tokens: the prefill's, the first step's, two
        assert point["ttft_s"] == pytest.approx(point["search_s"] + point["prefill_s"], rel=0.2, abs=1e-5)
        assert 0 < point["tokens_per_s"] < 4 * point["batch"] / point["decode_s"]  # the prefill is in it
        assert point["peak"]["decode"] > point["weights"] > 10**5
        assert point["over_used"] > point["over_reserved"] > 1
        assert point["kv_used"]["codes"] > 0 and point["reads_packed"]
        assert point["stepping"].startswith("eager (") and point["capture_s"] == 0
        assert point["predicted"] is None  # no rates of a CPU are known
        assert row["kv_bytes"]["used"]["total"] * point["batch"] == point["kv_used"]["total"]
    entry = content["scores"]["efficiency@48"]
    assert entry["score"] is None and entry["points"]["max_batch"] == 4 and entry["points"]["oom_batch"] is None
    assert content["tokens_per_s"] == max(row["measured"]["point"]["tokens_per_s"] for row in rows.values())
    assert content["ttft_s"]["median"] is None  # a mean over points would say nothing
    assert flat_row(content)["scores.efficiency@32.b4.tpot_s.median"] > 0
    points = entry["points"]["batches"]
    assert all(point["kv_ratio"] >= point["kv_ratio_reserved"] > 0 for point in points.values())
    assert all(set(point["itl_s"]) == {"p50", "p90", "p99"} and point["read_bytes"] > 0 for point in points.values())
    assert list(content["inter_token"]) == ["1", "2", "4"]
    for batch, line in content["inter_token"].items():
        other = content["scores"]["efficiency@32"]["points"]["batches"][batch]["tpot_s"]["median"]
        slope = (points[batch]["tpot_s"]["median"] - other) / 16
        assert line["slope_s"] == pytest.approx(slope, abs=1e-12) and line["lengths"] == 2
        assert line["intercept_s"] == pytest.approx(other - slope * (32 + 2), abs=1e-9)
        assert flat_row(content)[f"inter_token.{batch}.slope_s"] == line["slope_s"]


def test_memory_that_ends_is_a_row_and_the_last_of_its_length(tmp_path, small):
    calls = small(2)
    metrics = answer_run(settings(tmp_path, grid={"repeats": 1}))
    assert metrics["status"] == "ok"
    rows = rows_of(metrics)
    assert [row["status"] for row in rows.values()] == ["ok", "ok", "oom"] * 2
    for point in (row["measured"]["point"] for row in rows.values() if row["status"] == "ok"):  # of one generation
        whole = point["prefill_s"] + point["search_s"] + point["decode_s"]
        assert point["tokens_per_s"] == pytest.approx(4 * point["batch"] / whole, rel=1e-3)
    lost = rows["efficiency@48/b4"]["measured"]
    assert lost["point"]["bytes_asked"] == int(2.5 * 2**30) and lost["point"]["phase"] == "prefill"
    validate({key: value for key, value in metrics.items() if key != "run_dir"})
    points = metrics["scores"]["efficiency@48"]["points"]
    assert (points["max_batch"], points["oom_batch"]) == (2, 4)
    assert list(points["batches"]) == ["1", "2", "4"] and points["batches"]["4"]["status"] == "oom"
    text = tables.table_text([metrics], 120)
    assert "2.5 GiB more" in text and text.count("oom") == 2
    calls.clear()
    assert answer_run(settings(tmp_path, grid={"repeats": 1}))["scores"] == metrics["scores"] and not calls


def test_memory_that_ends_inside_onednn_is_an_end_too(tmp_path, monkeypatch):
    """torch goes on there with a slower library for the rest of the process: no point may be measured with that."""
    generate, seen = measuring.generate, []

    def leaves(model, cache, ids, **options):
        seen.append(torch.backends.mkldnn.enabled)
        generation = generate(model, cache, ids, **options)
        if ids.shape[0] > 1:
            torch.backends.mkldnn.enabled = False
        return generation

    monkeypatch.setattr(measuring, "generate", leaves)
    rows = rows_of(answer_run(settings(tmp_path, grid={"batches": [1, 2], "prompts": [48, 32], "repeats": 1})))
    assert [row["status"] for row in rows.values()] == ["ok", "oom"] * 2
    assert "oneDNN" in rows["efficiency@48/b2"]["measured"]["point"]["message"]
    assert seen[0] and torch.backends.mkldnn.enabled
    assert seen.count(False) == 2  # the census and the whole generation of the point that is lost share its block


@pytest.mark.slow  # 3 s
def test_resumed_runs_do_what_is_missing(tmp_path, small):
    calls = small(2)
    answer_run(settings(tmp_path, grid={"prompts": [48], "repeats": 1}))
    calls.clear()
    metrics = answer_run(settings(tmp_path, grid={"batches": [1, 2, 3, 4, 8], "repeats": 1}))
    assert {(width, batch) for width, batch, _ in calls[1:]} == {(48, 3), (32, 1), (32, 2), (32, 3)}
    assert calls[0] == (48, 1, 2)  # the warm-up
    assert metrics["scores"]["efficiency@48"]["points"]["oom_batch"] == 3
    calls = small(8)
    calls.clear()
    again = answer_run(settings(tmp_path, grid={"prompts": [48], "repeats": 1}, runtime={"retry": "oom"}))
    assert again["scores"]["efficiency@48"]["points"]["max_batch"] == 4
    assert {batch for _, batch, _ in calls} == {1, 4}


def test_what_failed_is_not_tried_for_ever(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(measuring, "generate", broken)
    metrics = answer_run(settings(tmp_path, grid={"batches": [1, 2], "prompts": [32]}))
    assert metrics["status"] == "error" and len(metrics["errors"]) == 2 and not rows_of(metrics)


def test_another_machine_or_runtime_is_another_run(tmp_path):
    grid = {"prompts": [32], "batches": [1], "repeats": 1}
    first = answer_run(settings(tmp_path, grid=grid))
    assert answer_run(settings(tmp_path, grid=grid, runtime={"prefill_chunk": 16}))["run_id"] != first["run_id"]
    assert answer_run(settings(tmp_path, grid=grid, runtime={"retry": "oom"}))["run_id"] == first["run_id"]
    assert first["tpot_s"]["median"] > 0 and first["ttft_s"]["n"] == 1  # one point: it is the run's figure


def test_figures_stand_beside_those_of_fp16(tmp_path, capsys):
    grid = {"prompts": [32], "batches": [1]}
    packed = answer_run(settings(tmp_path, grid=grid))
    full = answer_run(settings(tmp_path, "fp16", grid=grid))
    content = json.loads((Path(packed["run_dir"]) / "metrics.json").read_text())
    validate(content)
    pair = content["scores"]["efficiency@32"]["points"]["batches"]["1"]["vs_fp16"]
    mine, theirs = (tables.reread(m)["scores"]["efficiency@32"]["points"]["batches"]["1"] for m in (packed, full))
    assert pair["tokens_per_s"] == pytest.approx(mine["tokens_per_s"] / theirs["tokens_per_s"])
    assert "x fp16" in tables.table_text([packed, full], 140)
    assert tables.runs_csv([packed, full]).count("\n") == 3
    assert report(["--results", str(tmp_path)]) == 0 and "/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"model": {"weights": "pretrained", "hub_id": "nobody/nothing", "max_length": 50}},
            "do not fit the model together with",
        ),
        ({"runtime": {"batch_size": 2}}, "dataset.batches"),
        ({"decoding": {"stop": ["x"]}}, "exactly dataset.new_tokens"),
        ({"decoding": {"max_new_tokens": 1}}, "no decode step"),
    ],
)
def test_what_the_grid_cannot_run_with_is_refused_before_anything(tmp_path, groups, said):
    with pytest.raises(ConfigError, match=said):
        answer_run(settings(tmp_path / "runs", **groups))
    assert not (tmp_path / "runs").exists()


def test_speculation_counts_what_was_drafted(tmp_path):
    method = {"_target_": "kvbench.methods.quantspec.QuantSpec", "takes": ["hierarchical"], "gamma": 2}
    made = settings(tmp_path, "fp16", grid={"prompts": [300], "batches": [2], "repeats": 1, "new_tokens": 6})
    made |= {"method": method, "quantizer": yaml.safe_load(group_options("quantizer")["hierarchical"].read_text())}
    metrics = answer_run(made)
    validate({key: value for key, value in metrics.items() if key != "run_dir"})
    point = metrics["scores"]["efficiency@300"]["points"]["batches"]["2"]
    assert point["speculation"]["tokens"] == 2 * 5 and 0 < point["speculation"]["accepted"] <= 20
    assert point["tpot_s"]["median"] == point["tpot_s"]["mean"] > 0


def test_a_forced_acceptance_is_a_label_of_the_run_and_of_its_points(tmp_path):
    """Of 40 tokens, drafts of a changing number per round; the label is in tables and CSV files."""
    forced = {"gamma": "auto", "forced_acceptance": 1.0, "preset": "quantspec"}
    method = {"_target_": "kvbench.methods.quantspec.QuantSpec", "takes": ["hierarchical"], **forced}
    made = settings(tmp_path, "fp16", grid={"prompts": [60], "batches": [1], "repeats": 1, "new_tokens": 40})
    made |= {"method": method, "quantizer": yaml.safe_load(group_options("quantizer")["hierarchical"].read_text())}
    metrics = answer_run(made)
    validate({key: value for key, value in metrics.items() if key != "run_dir"})
    point = metrics["scores"]["efficiency@60"]["points"]["batches"]["1"]
    assert point["forced"] == 1.0 and metrics["label"].endswith("(forced acceptance 1)")
    assert point["round_times"]["acceptance"] == 1.0
    assert point["speculation"]["accepted"] == point["speculation"]["drafted"]
    assert "forced acceptance 1" in tables.runs_csv([metrics])


def test_random_weights_may_go_beyond_the_model_and_say_so(tmp_path):
    metrics = answer_run(settings(tmp_path, grid={"prompts": [48], "batches": [1]}, model={"max_length": 50}))
    assert metrics["scores"]["efficiency@48"]["points"]["batches"]["1"]["beyond"] == 50
    assert "exceed model.max_length=50" in tables.table_text([metrics], 120)


def meter(name="kivi", **how):
    from tests.zoo import LlamaConfig, LlamaForCausalLM

    numbers = {key: value for key, value in ARCHITECTURE.items() if key not in ("model_type", "rope")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**numbers, "head_dim": 64})).eval()
    method = load_method(name) if name not in METHODS else load_method(METHODS[name][0], METHODS[name][1])
    return Meter(model, byte_tokenizer(), method, How(**{"new_tokens": 6, "repeats": 1, "warm_up": 2, **how}))


@pytest.mark.parametrize("name", ["quantspec", "h2o", "streamingllm", "logquant"])
def test_any_method_gives_exactly_so_many_tokens(name):
    meter_ = meter(name)
    computed = meter_.point(160, 2)
    assert computed["status"] == "ok" and [len(row) for row in meter_.tokens] == [6, 6]
    if name == "quantspec":
        drafted = computed["speculation"]
        assert drafted["tokens"] == 2 * 5 and drafted["rounds"] >= 2


def test_cocktail_is_searched_anew_each_time():
    pytest.importorskip("bm25s")
    meter_ = Meter(
        meter().model,
        byte_tokenizer(),
        load_method("cocktail", encoder="bm25", split=[10, 30, 60]),
        How(new_tokens=4, repeats=2),
    )
    computed = meter_.point(400, 2)
    assert computed["search_s"] > 0 and computed["note"]["chunks"]["int2"] == 6
    assert computed["ttft_s"] == pytest.approx(computed["search_s"] + computed["prefill_s"], rel=0.5)


def test_kept_embeddings_are_out_of_the_way(monkeypatch):
    from types import SimpleNamespace

    kept, encoder = object(), SimpleNamespace()
    encoder.store = kept
    monkeypatch.setattr("kvbench.retrieval.encoders.encoder", lambda name: encoder)
    with measuring.fresh_search(SimpleNamespace(encoder="any")):
        assert encoder.store is not kept and not encoder.store.knows("any")
    assert encoder.store is kept


@pytest.mark.parametrize("name", ["fp16", "kivi", "quantspec", "streamingllm", "snapkv", "h2o"])
def test_random_keys_and_values_take_the_bytes_of_a_prompt(name):
    real = meter(name, new_tokens=4)
    random = meter(name, new_tokens=4, fill="random", census=False)
    mine, other = random.point(150, 2), real.point(150, 2)
    assert mine["kv_used"] == other["kv_used"] and mine["kv_reserved"] == other["kv_reserved"]
    assert mine["ttft_s"] is None and mine["fill"] == "random" and mine["tokens_per_s"] > 0
    again = meter(name, new_tokens=3, fill="random", census=False)
    again.point(150, 2)
    assert again.tokens == [row[:3] for row in random.tokens]


def test_memory_is_given_back_after_it_ended(monkeypatch):
    meter_ = meter("fp16")
    meter_.warm()
    held: list = []
    generate = measuring.generate

    def fake(model, cache, ids, **options):
        generate(model, cache, ids, **options)
        held.append(torch.zeros(1))  # what a generation holds when memory ends
        raise MemoryError

    monkeypatch.setattr(measuring, "generate", fake)
    caches = sum(type(thing).__name__ == "KVCache" for thing in gc.get_objects())
    assert meter_.point(64, 2)["status"] == "oom"
    assert sum(type(thing).__name__ == "KVCache" for thing in gc.get_objects()) <= caches
    monkeypatch.setattr(measuring, "generate", generate)
    assert meter_.point(64, 2)["status"] == "ok"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a CPU's memory is limited on Linux alone")
def test_a_memory_limit_ends_a_grid_in_a_row(tmp_path):
    grid = {"prompts": [256], "batches": [1, 3000], "repeats": 1}
    metrics = answer_run(settings(tmp_path, "fp16", grid=grid, runtime={"memory_limit_gb": 0.1}))
    assert metrics["status"] == "ok"
    points = metrics["scores"]["efficiency@256"]["points"]
    assert (points["max_batch"], points["oom_batch"]) == (1, 3000)


def test_times_of_steps_and_of_rounds():
    plain = Generation([[1] * 5], [], ["length"], 0.5, [9.0, 1.0, 2.0, 3.0], [4])
    computed = point_times(plain, [0.4, 0.5, 0.6], [0.1, 0.1, 0.1], batch=2, new_tokens=5)
    assert computed["first_step_s"] == 9.0 and computed["tpot_s"]["median"] == computed["tpot_s"]["mean"] == 2.0
    assert computed["ttft_s"] == 0.6 and computed["prefill_s"] == 0.5 and computed["search_s"] == 0.1
    assert computed["tokens_per_s"] == pytest.approx(2 * 5 / (0.6 + 0.1 + 15.0), abs=1e-6)
    rounds = [Round(8.0, [4], [4], [1], [2]), Round(3.0, [6], [4], [2], [3]), Round(1.0, [9], [1], [0], [1])]
    drafted = Generation([[1] * 7], [], ["length"], 0.5, [r.seconds for r in rounds], [4], rounds=rounds)
    computed = point_times(drafted, [0.5], [0.0], batch=1, new_tokens=7)
    assert computed["first_step_s"] == 4.0 and computed["tpot_s"]["median"] == 1.0 and computed["tpot_s"]["n"] == 2
    assert computed["speculation"] == {"rounds": 3, "drafted": 9, "accepted": 3, "tokens": 6}
    pair = [Round(6.0, [4, 4], [4, 4], [1, 3], [2, 4]), Round(5.0, [6, 8], [4, 0], [3, 0], [4, 0])]
    two = Generation([[1] * 7, [1] * 5], [], ["length", "stop"], 0.5, [6.0, 5.0], [4, 4], rounds=pair)
    computed = point_times(two, [0.5], [0.0], batch=2, new_tokens=7)
    assert computed["first_step_s"] == 2.0  # 6 s, of which a row got three tokens on the average
    assert computed["tpot_s"]["mean"] == pytest.approx(5 / 3, abs=1e-6)  # the other three of a row's six took 5 s
    one = point_times(Generation([[1, 1]], [], ["length"], 0.5, [2.0], [4]), [0.5], [0.0], batch=1, new_tokens=2)
    assert one["tpot_s"]["median"] == one["first_step_s"] == 2.0


def test_the_roofline_stands_beside_where_the_gpu_is_known(monkeypatch):
    model = meter("fp16").model
    figures = {"kv_used": {"total": 10**9}}
    assert predicted_point(model, figures, 4096, 2, None, False) is None
    monkeypatch.setattr("kvbench.measure.point_figures.device_name", lambda device: "NVIDIA H200")
    prediction = predicted_point(model, figures, 4096, 2, 9 * 10**8, False)
    assert prediction["gpu"] == "h200" and prediction["bound"] == "memory"
    assert prediction["tpot_s"] == pytest.approx(9.5e8 / 4.69e12, rel=0.02)
    assert prediction["peak_decode"] == pytest.approx(weight_bytes(model) + 10**9, rel=0.01)
    assert predicted_point(model, figures, 4096, 2, 9 * 10**8, True)["tpot_s"] is None
    parted = predicted_point(model, figures, 4096, 2, 9 * 10**8, False, together=4096)
    assert parted["peak_prefill"] < prediction["peak_prefill"] and parted["peak_decode"] == prediction["peak_decode"]
    model.config.num_experts = 8
    assert predicted_point(model, figures, 4096, 2, None, False) is None


def test_captured_tokens_are_compared_with_eager_ones(monkeypatch):
    plain = measuring.point_times
    monkeypatch.setattr(measuring, "point_times", lambda *a, **b: {**plain(*a, **b), "stepping": "graph"})
    assert meter("kivi", new_tokens=6, compare=4, census=False).point(40, 2)["same"] == {"of": 8, "alike": 8}
    eager = meter("kivi", new_tokens=6, compare=4, census=False)
    monkeypatch.setattr(measuring, "point_times", plain)
    assert "same" not in eager.point(40, 2)


def test_stock_transformers_stand_in_the_record_and_the_table(tmp_path, capsys):
    grid = {"prompts": [32], "batches": [1], "stock": ["dynamic", "static"], "untimed": 1}
    metrics = answer_run(settings(tmp_path, "kivi", grid=grid))
    (row,) = rows_of(metrics).values()
    point = row["measured"]["point"]
    assert point["repeats"] == 2 and list(point["stock"]) == ["dynamic", "static"]
    for other in point["stock"].values():
        assert other["status"] == "ok" and other["prefill_s"] > 0 and other["tpot_s"]["n"] == 3
        assert other["kv_used"]["total"] == 2 * 32 * 2 * 32 * 4
    assert point["itl_s"]["p50"] <= point["itl_s"]["p90"] <= point["itl_s"]["p99"]
    assert point["read_bytes"] > point["kv_used"]["total"] and point["ceiling"] is None
    validate(json.loads((Path(metrics["run_dir"]) / "metrics.json").read_text()))


def test_settings_of_a_point_count_in_the_id_only_where_they_differ(tmp_path):
    from kvbench.tasks.efficiency import Efficiency

    assert Efficiency().identity() == {
        "target": "efficiency", "version": 1, "new_tokens": 32, "repeats": 3, "warm_up": 8, "seed": 0
    }  # fmt: skip
    assert Efficiency(fill="random", compare=4).identity().items() >= {"fill": "random", "compare": 4}.items()
