"""The benches of whole models on a CPU: rows, what stands beside them, what is refused."""

import json

import pytest
import torch

import kvbench.measure.meter as measuring
from kvbench.bench import __main__ as command
from kvbench.bench import settings, stock, tpot, whole
from kvbench.bench.command import BASELINES, COMMANDS
from kvbench.errors import ConfigError, ModelError
from kvbench.methods.cocktail import Cocktail
from kvbench.models.spec import local_folder
from kvbench.parallel import launch

HERE = ["--device", "cpu", "--model", "tiny", "--dtype", "float32"]


def rows(folder, *arguments):
    assert command.main([*arguments, *HERE, "--out", str(folder), "--name", "found"]) == 0
    found = json.loads((folder / "found.json").read_text())
    assert found["model"] == "tiny" and found["weights"] == "random" and found["device"]
    return found["rows"]


def test_settings_as_they_are_typed():
    assert settings.setting("fp16").method.quantizer is None
    kivi = settings.setting("kivi:int4_g128").method
    assert (kivi.quantizer.key.group_size, kivi.quantizer.value.group_size, kivi.quantizer.key.bits) == (
        128,
        "head_dim",
        4,
    )
    kivi = settings.setting("kivi:int2:residual=64,quantizer.key.group_size=64,sinks=2").method
    assert (kivi.residual, kivi.sinks, kivi.quantizer.key.group_size) == (64, 2, 64)
    assert settings.setting("kivi:quantizer.key.bits=4").method.quantizer.key.bits == 4
    assert settings.setting("logquant:int2_g128:window=64,reserved=192").method.W == 64
    for text in ("cocktail:split=[10,30,60],encoder=bm25", "cocktail:split=10/30/60:encoder=bm25"):
        assert settings.setting(text).method.split == (10, 30, 60)
    tiny = str(local_folder(settings.model_config("tiny").path) / "calibration")
    assert settings.setting(f"kvquant:calibration={tiny}").method.calibration == tiny
    for path, read in {"/data/@x/%b": None, "'/a/b'": "/a/b", "'10/20'": "10/20", "10/30/": None, "/": None}.items():
        assert settings.listed("key", path) == (read or path)
    assert settings.listed("key", "[a/b, c]") == ["a/b", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kivy", "did you mean 'kivi'"),
        ("kivi:int5", "no such quantizer"),
        ("kivi:int2:int4", "two quantizers"),
        ("kivi:int2:residual=33", "multiple of the key group"),
        ("kivi:int2:residuel=64", "did you mean 'residual'"),
        ("kivi:int2:quantizer.key.groups=64", "quantizer.key.group_size"),
        ("cocktail:int4", "does not take this quantizer"),
    ],
)
def test_wrong_settings_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        settings.setting(text)


def test_models_by_name():
    assert settings.model_config("llama2-7b").weights == "random"
    assert settings.model_config("llama3.1-8b", dtype="float16").dtype == "float16"
    with pytest.raises(ConfigError, match="did you mean 'llama2-7b'"):
        settings.model_config("llama-7b")
    assert local_folder(settings.model_config("tiny").path).is_dir()


def test_tpot_beside_stock_caches(tmp_path, monkeypatch, capsys):
    # as if a step had been captured: its tokens are then compared with eager ones
    plain = measuring.times
    monkeypatch.setattr(measuring, "times", lambda *a, **b: {**plain(*a, **b), "stepping": "graph"})
    found = rows(
        tmp_path, "tpot", "--settings", "fp16", "kivi:int4:residual=32", "--contexts", "70", "--steps", "4",
        "--baselines", "dynamic", "static", "--eager", "--check", "3",
    )  # fmt: skip
    names = [(row["setting"], row.get("graphs")) for row in found]
    kivi = "kivi:int4:residual=32"
    assert names == [
        ("dynamic", None), ("static", None), ("fp16", "always"), ("fp16", "never"), (kivi, "always"), (kivi, "never")
    ]  # fmt: skip
    for row in found:
        assert row["status"] == "ok" and row["tpot_s"]["n"] == (4 if "graphs" not in row else 3)
        assert row["GB_s"] * row["tpot_s"]["median"] * 1e9 == pytest.approx(row["read_bytes"])
    dynamic, full, packed = found[0], found[2], found[4]
    assert packed["kv"] < full["kv"] and dynamic["kv"] / 70 == full["kv"] / 74
    assert dynamic["tokens"][:5] == found[1]["tokens"][:5] == full["tokens"]  # greedy, the same model and prompt
    assert full["same"] == {"of": 3, "alike": 3}
    assert "DynamicCache, eager" in capsys.readouterr().out


def test_random_keys_instead_of_a_prompt(tmp_path):
    found = rows(
        tmp_path, "tpot", "--settings", "kivi", "--contexts", "256", "--steps", "3", "--fill", "random",
        "--baselines", "static",
    )  # fmt: skip
    assert [row["fill"] for row in found] == ["random", "random"]
    assert found[1]["ttft_s"] is None and found[1]["kv_used"]["codes"] > 0


def test_the_roofline_and_the_ceiling_stand_beside(monkeypatch):
    from types import SimpleNamespace

    from tests.zoo import model

    monkeypatch.setattr(tpot, "device_name", lambda device: "NVIDIA H200")
    bench = SimpleNamespace(model=model(), device="cpu", loaded=SimpleNamespace(dtype=torch.float32))
    row = {"status": "ok", "kv": 10**9, "batch": 1, "context": 4096, "tpot_s": {"median": 1e-3}}
    tpot.judged(bench, row, 4000.0)
    assert row["predicted"]["gpu"] == "h200"
    assert row["over_roof"] == pytest.approx(1e-3 / row["predicted"]["tpot_s"])
    assert row["GB_s"] == pytest.approx(row["read_bytes"] / 1e6) and row["read_share"] == row["GB_s"] / 4000
    assert tpot.line({**row, "setting": "x", "stepping": "graph", "tpot_s": {"median": 1, "p10": 1, "p90": 1}})


def test_prefill_beside_stock(tmp_path):
    (row,) = rows(tmp_path, "prefill", "--settings", "kivi:int4:residual=32", "--contexts", "200", "--repeats", "1")
    assert row["status"] == "ok" and row["over_stock"] == row["seconds"] / row["stock_s"] > 0
    assert row["above"] == row["peak"] - row["weights"] - row["kv_reserved"] > row["layer_kv"]
    assert row["layer_kv"] == 2 * 200 * 2 * 64 * 4
    assert row["kv_used"] < row["kv_reserved"]


def test_memory_grows_the_batch_until_it_ends(tmp_path, monkeypatch, capsys):
    generate = measuring.generate

    def fake(model, cache, ids, **options):
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")
        return generate(model, cache, ids, **options)

    monkeypatch.setattr(measuring, "generate", fake)
    found = rows(
        tmp_path, "memory", "--settings", "kivi", "--contexts", "40", "--new-tokens", "3", "--bisect", "1",
        "--memory-limit-gb", "8",
    )  # fmt: skip
    assert [(row["batch"], row["status"]) for row in found] == [(1, "ok"), (2, "ok"), (4, "oom"), (3, "oom")]
    assert found[0]["setting"] == "kivi" and found[0]["over_used"] > 1
    assert "3.00 GiB asked for" in capsys.readouterr().out


def test_without_a_gpu_or_with_wrong_words_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in COMMANDS:
        assert command.main([name]) == 2
        assert "--device cpu" in capsys.readouterr().err
    assert command.main(["memory", *HERE, "--settings", "kivi:int5", "--out", str(tmp_path)]) == 2
    assert "no such quantizer" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # said before anything is measured
        patch.setattr(Cocktail, "ready", lambda self: (_ for _ in ()).throw(ModelError("no encoder")))
        patch.setattr(whole, "load", None)
        assert command.main(["memory", *HERE, "--settings", "fp16", "cocktail", "--out", str(tmp_path)]) == 1
        assert "no encoder" in capsys.readouterr().err
    assert command.main(["tpot", *HERE, "--weights", "pretrained", "--contexts", "8k", "--out", str(tmp_path)]) == 2
    assert "more than tiny takes (4096)" in capsys.readouterr().err
    random = ["tpot", *HERE, "--settings", "snapkv", "--fill", "random", "--contexts", "64", "--out", str(tmp_path)]
    assert command.main(random) == 2
    assert "--fill prefill" in capsys.readouterr().err
    wrong = [("tpot", "--batches", "0"), ("tpot", "--check", "-1"), ("memory", "--new-tokens", "1")]
    wrong += [("tpot", "--device", "gpu")]
    wrong += [("memory", "--bisect", "-1"), ("memory", "--memory-limit-gb", "0"), ("prefill", "--prefill-rows", "0")]
    for words in wrong:
        with pytest.raises(SystemExit):
            command.main(list(words))
        assert f"{words[1]}: '{words[2]}' is no " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for name in ("memory", "predict"):
        given = ["memory", *HERE] if name == "memory" else ["predict", "--contexts", "4k"]
        assert command.main([*given, "--out", str(tmp_path / "file" / "x")]) == 2
        assert "is a file, not a folder" in capsys.readouterr().err
    monkeypatch.setattr(launch, "size", lambda: 2)
    assert command.main(["memory", *HERE]) == 2
    assert "measures one" in capsys.readouterr().err
    assert set(BASELINES) == set(stock.BASELINES)


def test_a_model_without_room_and_a_disk_without_any_are_said(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    given = ["memory", *HERE, "--contexts", "20", "--batches", "1", "--new-tokens", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(whole.report, "write", full)
    assert command.main(given) == 1
    assert "cannot be written: [Errno 28]" in capsys.readouterr().err

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(whole, "load", none)
    assert command.main([*given, "--memory-limit-gb", "8"]) == 1
    assert "tiny itself has no room on cpu within --memory-limit-gb 8" in capsys.readouterr().err


def test_a_run_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(tpot, "baseline", broken)
    arguments = ["tpot", *HERE, "--contexts", "64", "--steps", "2", "--baselines", "dynamic", "--out", str(tmp_path)]
    assert command.main([*arguments, "--name", "found"]) == 1
    first, second = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert first["status"] == "failed" and "no such kernel" in first["message"] and second["status"] == "ok"
