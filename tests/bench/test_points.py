"""The benches of whole models on a CPU: rows, the other files that they write, and refusals."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvbench.measure.meter as measuring
from kvbench.bench import __main__ as command
from kvbench.bench import choices, points
from kvbench.bench.point_table import COLUMNS, HEAD, point_cells, point_table
from kvbench.errors import ConfigError, ModelError
from kvbench.measure import point_figures, stock
from kvbench.methods.cocktail import Cocktail
from kvbench.models.spec import local_folder
from kvbench.parallel import launch
from kvbench.runner.run import answer_run
from kvbench.tasks.efficiency import STOCK, Efficiency
from kvbench.util import atomic
from tests.measure.test_meter import settings

COMMANDS = ("tpot", "prefill", "memory")
HERE = ["--device", "cpu", "--model", "tiny", "--dtype", "float32"]


def rows(folder, *arguments):
    assert command.main([*arguments, *HERE, "--out", str(folder), "--name", "found"]) == 0
    content = json.loads((folder / "found.json").read_text())
    assert content["model"] == "tiny" and content["weights"] == "random" and content["device"]
    return content["rows"]


def test_models_by_name():
    assert choices.model_config("llama2-7b").weights == "random"
    assert choices.model_config("llama3.1-8b", dtype="float16").dtype == "float16"
    with pytest.raises(ConfigError, match="did you mean 'llama2-7b'"):
        choices.model_config("llama-7b")
    assert local_folder(choices.model_config("tiny").path).is_dir()


def test_tpot_beside_stock_caches(tmp_path, monkeypatch, capsys):
    # as if a step had been captured: its tokens are then compared with eager ones
    plain = measuring.point_times
    monkeypatch.setattr(measuring, "point_times", lambda *a, **b: {**plain(*a, **b), "stepping": "graph"})
    computed = rows(
        tmp_path, "tpot", "--settings", "fp16", "kivi:int4:residual=32", "--contexts", "70", "--steps", "4",
        "--baselines", "dynamic", "static", "--eager", "--check", "3",
    )  # fmt: skip
    names = [(row["setting"], row.get("graphs")) for row in computed]
    kivi = "kivi:int4:residual=32"
    assert names == [
        ("dynamic", None), ("static", None), ("fp16", "always"), ("fp16", "never"), (kivi, "always"), (kivi, "never")
    ]  # fmt: skip
    for row in computed:
        assert row["status"] == "ok" and row["tpot_s"]["n"] == (4 if "graphs" not in row else 3)
        assert row["GB_s"] * row["tpot_s"]["median"] * 1e9 == pytest.approx(row["read_bytes"])
    dynamic, full, packed = computed[0], computed[2], computed[4]
    sizes = [row["kv_used"]["total"] for row in (dynamic, full, packed)]
    assert sizes[2] < sizes[1] and sizes[0] / 70 == sizes[1] / 74
    assert dynamic["tokens"][:5] == computed[1]["tokens"][:5] == full["tokens"]  # greedy, the same model and prompt
    assert full["same"] == {"of": 3, "alike": 3}
    assert "DynamicCache, eager" in capsys.readouterr().out


def test_random_keys_instead_of_a_prompt(tmp_path):
    computed = rows(
        tmp_path, "tpot", "--settings", "kivi", "--contexts", "256", "--steps", "3", "--fill", "random",
        "--baselines", "static",
    )  # fmt: skip
    assert [row["fill"] for row in computed] == ["random", "random"]
    assert computed[1]["ttft_s"] is None and computed[1]["kv_used"]["codes"] > 0


@pytest.mark.parametrize(("rate", "ceiling"), [(4000.0, ("measured", 4000.0)), (None, ("known", 4690.0))])
def test_bytes_of_a_step_stand_beside_the_ceiling(rate, ceiling, monkeypatch):
    from tests.zoo import model

    tiny = model()
    figures = {"kv_used": {"total": 10**9}, "tpot_s": {"median": 1e-3}, "predicted": {"tpot_s": 5e-4}}
    unknown = point_figures.step_traffic(tiny, figures)
    assert unknown["ceiling"] is None and unknown["read_share"] is None and unknown["over_roof"] == 2
    monkeypatch.setattr(point_figures, "device_name", lambda device: "NVIDIA H200")
    moved = point_figures.step_traffic(tiny, figures, rate)
    weights = sum(p.numel() * p.element_size() for p in tiny.parameters())
    assert 10**9 < moved["read_bytes"] <= 10**9 + weights
    assert moved["GB_s"] == pytest.approx(moved["read_bytes"] / 1e6)
    assert (moved["ceiling"]["kind"], moved["ceiling"]["GB_s"]) == (ceiling[0], pytest.approx(ceiling[1]))
    assert moved["read_share"] == moved["GB_s"] / moved["ceiling"]["GB_s"]
    assert point_figures.step_traffic(tiny, {**figures, "speculation": {"rounds": 1}}) == {
        "read_bytes": moved["read_bytes"]
    }


def test_prefill_beside_stock(tmp_path):
    computed = rows(tmp_path, "prefill", "--settings", "kivi:int4:residual=32", "--contexts", "200", "--repeats", "1")
    other, row = computed
    assert other["setting"] == "dynamic" and other["prefill_s"] > 0 and other["repeats"] == 1
    assert row["status"] == "ok" and row["repeats"] == 1 and row["prefill_path"]
    cells = dict(zip([*HEAD, *COLUMNS["prefill"]], point_cells(row, "prefill", computed), strict=True))
    assert cells["x"] == row["prefill_s"] / other["prefill_s"] and cells["stock ms"] == 1e3 * other["prefill_s"]
    above = row["peak"]["prefill"] - row["weights"] - row["kv_reserved"]["total"]
    assert cells["above"] == above / 2**30 and above > row["layer_kv"]
    assert row["layer_kv"] == 2 * 200 * 2 * 64 * 4
    assert row["kv_used"]["total"] < row["kv_reserved"]["total"]


def test_a_row_is_the_record_of_a_run(tmp_path):
    """Both ways to measure write the same keys."""
    (row,) = rows(tmp_path, "memory", "--settings", "kivi", "--contexts", "40", "--batches", "1", "--new-tokens", "3")
    metrics = answer_run(settings(tmp_path, grid={"prompts": [40], "batches": [1], "new_tokens": 3, "repeats": 1}))
    stored = Path(metrics["run_dir"]) / "samples.jsonl"
    record = json.loads(stored.read_text())["measured"]["point"]
    own = {"setting", "graphs", "compile", "tokens"}
    assert set(record) == set(row) - own and own <= set(row)


def test_memory_grows_the_batch_until_it_ends(tmp_path, monkeypatch, capsys):
    generate = measuring.generate

    def fake(model, cache, ids, **options):
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")
        return generate(model, cache, ids, **options)

    monkeypatch.setattr(measuring, "generate", fake)
    computed = rows(
        tmp_path, "memory", "--settings", "kivi", "--contexts", "40", "--new-tokens", "3", "--bisect", "1",
        "--memory-limit-gb", "8",
    )  # fmt: skip
    assert [(row["batch"], row["status"]) for row in computed] == [(1, "ok"), (2, "ok"), (4, "oom"), (3, "oom")]
    assert computed[0]["setting"] == "kivi" and computed[0]["over_used"] > 1
    assert "3.00 GiB asked for" in capsys.readouterr().out


def test_without_a_gpu_or_with_wrong_words_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in COMMANDS:
        assert command.main([name]) == 2
        assert "--device cpu" in capsys.readouterr().err
    assert command.main(["memory", *HERE, "--settings", "kivi:int7", "--out", str(tmp_path)]) == 2
    assert "no such quantizer" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # said before anything is measured
        patch.setattr(Cocktail, "ready", lambda self: (_ for _ in ()).throw(ModelError("no encoder")))
        patch.setattr(points, "load_joined", None)
        assert command.main(["memory", *HERE, "--settings", "fp16", "cocktail", "--out", str(tmp_path)]) == 1
        assert "no encoder" in capsys.readouterr().err
    assert command.main(["tpot", *HERE, "--weights", "pretrained", "--contexts", "8k", "--out", str(tmp_path)]) == 2
    assert "exceed the limit of tiny (4096)" in capsys.readouterr().err
    wrong = [("tpot", "--batches", "0"), ("tpot", "--check", "-1"), ("memory", "--new-tokens", "1")]
    wrong += [("tpot", "--device", "gpu")]
    wrong += [("memory", "--bisect", "-1"), ("memory", "--memory-limit-gb", "0"), ("prefill", "--prefill-rows", "0")]
    for words in wrong:
        with pytest.raises(SystemExit):
            command.main(list(words))
        assert f"{words[1]}: '{words[2]}' is not a " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for name in ("memory", "predict"):
        given = ["memory", *HERE] if name == "memory" else ["predict", "--contexts", "4k"]
        assert command.main([*given, "--out", str(tmp_path / "file" / "x")]) == 2
        assert "is a file, not a folder" in capsys.readouterr().err
    monkeypatch.setattr(launch, "size", lambda: 2)
    assert command.main(["memory", *HERE]) == 2
    assert "measures a single one" in capsys.readouterr().err
    assert set(STOCK) == set(stock.BASELINES)


def test_a_model_without_room_and_a_disk_without_any_are_said(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    given = ["memory", *HERE, "--contexts", "20", "--batches", "1", "--new-tokens", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(atomic, "replace_file", full)
    assert command.main(given) == 1
    assert "cannot be written: [Errno 28]" in capsys.readouterr().err

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(points, "load_joined", none)
    assert command.main([*given, "--memory-limit-gb", "8"]) == 1
    assert "tiny does not fit on cpu within --memory-limit-gb 8" in capsys.readouterr().err


def test_a_run_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(stock, "stock_point", broken)
    arguments = ["tpot", *HERE, "--contexts", "64", "--steps", "2", "--baselines", "dynamic", "--out", str(tmp_path)]
    assert command.main([*arguments, "--name", "found"]) == 1
    first, second = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert first["status"] == "failed" and "no such kernel" in first["message"] and second["status"] == "ok"


def test_presets_are_the_defaults_of_the_commands():
    for name in COMMANDS:
        args = command.bench_parser().parse_args([name])
        grid = Efficiency(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in choices.point_preset(name).items()}
        )
        assert tuple(args.contexts) == grid.prompts and args.new_tokens == grid.new_tokens
        assert (args.repeats, args.untimed, args.fill, args.compare) == (
            grid.repeats, grid.untimed, grid.fill, grid.compare
        )  # fmt: skip
        assert tuple(args.baselines) == grid.stock
        assert args.batches is None if grid.batches == "grow" else tuple(args.batches) == grid.batches


def test_tables_stand_by_prompt_and_a_failed_point_says_why():
    row = {"setting": "fp16", "prompt": 4096, "batch": 8, "new_tokens": 2, "status": "oom", "phase": "prefill"}
    for name in COMMANDS:
        assert len(point_cells(row, name, [row])) == len(HEAD) + len(COLUMNS[name])
        assert point_cells({**row, "bytes_asked": 3 << 29}, name, [row])[-1] == "oom in prefill, 1.50 GiB asked for"
        assert point_cells(row, name, [row])[-1] == "oom in prefill"
    short = {**row, "prompt": 128, "setting": "kivi"}
    texts = point_table([row, short], "tpot").splitlines()
    assert texts[2].startswith("kivi") and texts[3].startswith("fp16")
    assert point_table([row, short], "memory").splitlines()[2].startswith("fp16")


def bench(*words, **parts):
    """A bench with its arguments alone."""
    return SimpleNamespace(args=command.bench_parser().parse_args(list(words)), **parts)


def test_options_reach_the_meter(monkeypatch):
    monkeypatch.setattr(points, "Meter", lambda model, tokenizer, method, how: (model, tokenizer, method, how))
    words = ["--seed", "3", "--kernels", "triton", "--check", "2", "--repeats", "4", "--untimed", "1", "--compile"]
    words += ["--prefill-chunk", "64", "--prefill-rows", "all", "--new-tokens", "9"]
    for name, census in (("memory", True), ("prefill", True), ("tpot", False)):
        own = bench(name, *words, read_rate=5.0, model="m", loaded=SimpleNamespace(tokenizer="t"))
        model, tokenizer, method, how = points.PointBench.meter(own, "method", "always")
        assert (model, tokenizer, method, how.graphs, how.census) == ("m", "t", "method", "always", census)
        assert (how.seed, how.options.kernels, how.compare, how.repeats, how.untimed) == (3, "triton", 2, 4, 1)
        assert (how.compile, how.prefill_chunk, how.prefill_rows, how.new_tokens) == (True, 64, None, 9)
        assert how.read_rate == 5.0 and points.PointBench.meter(own, "method")[3].graphs == "never"


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ([], ["always"]),
        (["--eager"], ["always", "never"]),
        (["--eager-only"], ["never"]),
        (["--eager", "--eager-only"], ["never"]),
    ],
)
def test_stock_comes_first_and_each_setting_is_detached(words, ways):
    events = []

    def setting(name):
        return name, SimpleNamespace(detach=lambda model: events.append(f"-{name}"))

    pairs = [setting("a"), setting("b")]
    own = bench(
        "tpot", *words, "--baselines", "dynamic", "static", methods=pairs, model="m", _point=lambda *given: {},
        meter=lambda method, graphs="never": SimpleNamespace(stock_point=lambda *given: {}),
        _grid=lambda start, measure: events.append((start["setting"], start.get("graphs"))),
    )  # fmt: skip
    own._ways = partial(points.PointBench._ways, own)
    points.PointBench.measure_all(own)
    per_setting = [[*((name, way) for way in ways for _ in [0])] for name in "ab"]
    assert [event for event in events if not isinstance(event, str)] == [
        ("dynamic", None), ("static", None), *per_setting[0], *per_setting[1]
    ]  # fmt: skip
    assert [event for event in events if isinstance(event, str)] == [f"-{name}" for name in "ab" for _ in ways]


def test_an_attempt_that_fails_is_a_record(monkeypatch):
    released = []
    monkeypatch.setattr(points, "release", released.append)
    own = bench("memory", "--new-tokens", "7", device="cpu")

    def attempt(error):
        def measure(prompt, batch):
            raise error

        return points.PointBench.attempt(own, measure, 64, 2)

    row = attempt(RuntimeError("no\n  such kernel"))
    assert row == {
        "prompt": 64, "batch": 2, "new_tokens": 7, "status": "failed", "message": "RuntimeError: no such kernel",
        "bytes_asked": None,
    }  # fmt: skip
    row = attempt(torch.OutOfMemoryError("Tried to allocate 1.00 GiB"))
    assert (row["status"], row["bytes_asked"]) == ("oom", 2**30) and released == ["cpu"] * 2
    assert points.PointBench.attempt(own, lambda prompt, batch: {"at": (prompt, batch)}, 64, 2) == {"at": (64, 2)}
    with pytest.raises(ModelError):
        attempt(ModelError("yours"))
    assert len(released) == 2


def test_a_pretrained_model_has_a_longest_sequence(monkeypatch):
    def check(contexts, new, random):
        loaded = SimpleNamespace(random_weights=random, max_length=4096)
        monkeypatch.setattr(points, "load_joined", lambda model, runtime: compiled.append(runtime.compile) or loaded)
        given = ("--contexts", *contexts, "--new-tokens", new, *(["--compile"] if random else []))
        assert points.loaded_model(bench("tpot", *given).args) is loaded

    compiled: list[bool] = []
    check(["64", "4000"], "96", False)
    check(["64", "8k"], "96", True)
    with pytest.raises(ConfigError, match=r"--contexts=4000: and 97 new tokens together exceed the limit"):
        check(["4000", "64"], "97", False)
    assert compiled == [False, True, False]
