"""The command line of ``python -m kvbench.tune``, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.tune.aim import Aim, Scored
from kvbench.tune.command import composed_config, exported, layer_table, main, sentence
from kvbench.tune.exports import EXPORTS
from kvbench.tune.space import Space


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--bits: is missing"),
        ("--bits 5 --formats q9_0", "--formats=q9_0: is not a format"),
        ("--bits 5 --formats fp16", "names no packed format"),
        ("--bits 5 --out pyproject.toml/x", "--out=pyproject.toml/x: "),
        ("--bits 1", "--bits=1.0: is below the smallest format: octave_k3v3 has 4 bits an element"),
        ("--bytes 9 --formats q8_0 iq4_nl", "iq4_nl has 1152 bytes a token"),
        ("model=nosuch --bits 5", "model=nosuch: no such model"),
        ("--bits 5 method=kivi", "method=kivi: has no format per layer"),
        ("--bits 5 dataset=mini", "is not one of fidelity"),
        ("--bits 5 model=endpoint model.urls=[http://localhost:1] model.preset=tiny", "has its caches in a server"),
        ("--recipe nowhere.json", "nowhere.json: cannot be read as a recipe"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", ["--held-out -1", "--seed -1", "--budget 0", "--windows 0", "--tie 0", "--kl nan"]
)
def test_numbers_that_make_no_sense_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert f"argument {arguments.split()[0]}: '{arguments.split()[1]}' is not a" in capsys.readouterr().err


def test_a_budget_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.tune.session.load_model", lambda *_: pytest.fail("weights were read"))
    assert main(["--bits", "4.4", "--formats", "q8_0", "iq4_nl"]) == 2
    assert "--bits=4.4: is below the smallest format: iq4_nl has 4.5" in capsys.readouterr().err


@pytest.mark.parametrize(("search", "hint"), [("adaptive", "raise --budget or --bits\n"), ("ends", "use --search")])
def test_a_search_without_a_recipe_names_another_search_only_if_there_is_one(
    search: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.tune.session.Tuning", lambda *_: SimpleNamespace(space=lambda *_: None))
    monkeypatch.setattr("kvbench.tune.command._budget_bits", lambda *_: 5.0)
    monkeypatch.setattr("kvbench.tune.search.run_search", lambda *_: (None, []))
    assert main(["--bits", "5", "--search", search, "--out", str(tmp_path)]) == 1
    assert hint in capsys.readouterr().err


def test_a_command_line_keeps_what_is_typed() -> None:
    config = composed_config(["model=tiny", "dataset.window=100", "dataset.prefill=60", "model.dtype=float32"], 7)
    assert (config.dataset["window"], config.dataset["limit"], config.model.dtype) == (100, 7, "float32")


def test_the_folder_of_runs_does_not_matter(tmp_path: Path) -> None:
    for name in ("plain", "o'n e=$1,{x}", "a\\b"):
        config = composed_config(["model=tiny"], 7, tmp_path / name)
        assert config.runtime.results_dir == str(tmp_path / name)


FORMS = {
    "uniform": ["q8_0/q4_0"] * 3,
    "mixed": ["q8_0", "q8_0/q4_0"],
    "fp8": ["fp16", "fp8", "fp8", "fp16"],
    "fp8 everywhere": ["fp8", "fp8"],
    "modelopt": ["fp8", "nvfp4", "fp8/nvfp4", "fp16"],
    "exact": ["fp16", "fp16"],
}


@pytest.mark.parametrize(
    ("engine", "forms", "flags"),
    [
        ("kvbench", "mixed", "method=engine 'method.layers=[0:q8_0,1:q8_0/q4_0]'"),
        ("llama.cpp", "uniform", "-fa on -ctk q8_0 -ctv q4_0"),
        ("llama.cpp", "exact", "-ctk f16 -ctv f16"),
        ("vllm", "fp8", "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 3"),
        ("vllm", "fp8 everywhere", "--kv-cache-dtype fp8"),
        ("vllm", "exact", "--kv-cache-dtype auto"),
        ("sglang", "fp8 everywhere", "--kv-cache-dtype fp8_e4m3"),
        ("sglang", "exact", "--kv-cache-dtype auto"),
        ("tensorrt-llm", "fp8 everywhere", "--kv_cache_dtype fp8"),
    ],
)
def test_flags_of_engines(engine: str, forms: str, flags: str) -> None:
    assert EXPORTS[engine](FORMS[forms]) == flags


@pytest.mark.parametrize(
    ("engine", "forms", "layer"),
    [
        ("llama.cpp", "mixed", "layer 1 is q8_0/q4_0"),
        ("llama.cpp", "fp8", "layer 1 is fp8"),
        ("vllm", "uniform", "layer 0 is q8_0/q4_0"),
        ("vllm", "modelopt", "layer 1 is nvfp4"),
        ("modelopt", "uniform", "layer 0 is q8_0/q4_0"),
        ("sglang", "fp8", "layer 1 is fp8"),
        ("sglang", "uniform", "layer 0 is q8_0/q4_0"),
        ("tensorrt-llm", "fp8", "layer 1 is fp8"),
        ("tensorrt-llm", "modelopt", "layer 1 is nvfp4"),
    ],
)
def test_what_an_engine_cannot_say_is_refused_by_the_layer(engine: str, forms: str, layer: str) -> None:
    with pytest.raises(KvbenchError, match=layer):
        EXPORTS[engine](FORMS[forms])


def test_modelopt_has_an_entry_for_each_packed_layer() -> None:
    entries = json.loads(EXPORTS["modelopt"](FORMS["modelopt"]))["quantization"]
    assert entries == {
        "kv_cache_quant_algo": "MIXED_PRECISION",
        "kv_cache_quantized_layers": {
            "model.layers.0.self_attn": {"quant_algo": "FP8"},
            "model.layers.1.self_attn": {"quant_algo": "NVFP4"},
            "model.layers.2.self_attn": {"quant_algo": "FP8_K_NVFP4_V"},
        },
        "kv_cache_schema_version": 1,
    }
    assert json.loads(EXPORTS["modelopt"](FORMS["fp8"]))["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_a_recipe_is_exported_without_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.json"
    layers = [{"keys": "q8_0", "values": "q4_0"}] * 2
    path.write_text(json.dumps({"kvbench": 1, "kind": "recipe", "layers": layers}))
    assert main(["--recipe", str(path), "--export", "llama.cpp", "vllm"]) == 0
    shown = capsys.readouterr().out
    assert "llama.cpp: -fa on -ctk q8_0 -ctv q4_0\n" in shown
    assert "vllm: vLLM cannot say this recipe: layer 0 is q8_0/q4_0" in shown
    assert main(["--recipe", str(path), "--export", "vllm"]) == 1
    path.write_text(json.dumps({"kind": "run", "layers": layers}))
    assert main(["--recipe", str(path)]) == 1
    assert f"{path}: the file is not a recipe" in capsys.readouterr().err
    path.write_text(json.dumps({"kind": "recipe", "layers": [*layers, {"keys": "q8_0", "values": "q9_0"}]}))
    assert main(["--recipe", str(path)]) == 1
    assert f"{path}: layer 2 has 'q9_0' for its values" in capsys.readouterr().err
    for keys in ("fp16", "octave_k3v3"):
        path.write_text(json.dumps({"kind": "recipe", "layers": [*layers, {"keys": keys, "values": "q8_0"}]}))
        assert main(["--recipe", str(path)]) == 1
        assert f"layer 2 has {keys} for its keys and q8_0 for its values" in capsys.readouterr().err
    for damaged in ("", "[1]", "[" * 100_000, '{"kind": "recipe", "layers": [{"keys": ["q8_0"], "values": "q8_0"}]}'):
        path.write_text(damaged)
        assert main(["--recipe", str(path)]) == 1
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(("held_out", "texts"), [(0, "(99 %: 0.5) on the texts of the search, none"), (2, "held-out")])
def test_the_sentence_says_of_which_texts_its_figures_are(held_out: int, texts: str) -> None:
    record = {"model": "toy", "bits": 5.0, "kl": {"mean": 0.25, "se": None, "p99": 0.5}}
    space = Space((1,), 64, 64, ("fp16", "q8_0"), (1,))
    best = Scored(("q8_0",), np.array([0.125]), 0.5)
    shown = sentence(record, best, Aim(space, 5.0), held_out)
    assert texts in shown
    assert ("0.125 on those of the search" in shown) == bool(held_out)


def test_the_table_has_a_line_for_each_run_of_layers() -> None:
    lines = layer_table(["fp16", "q8_0/q4_0", "q8_0/q4_0"]).splitlines()
    assert [line.split() for line in lines[1:]] == [["0", "fp16", "fp16"], ["1-2", "q8_0", "q4_0"]]
    assert exported(["fp16"], ["kvbench"]) == ["kvbench: method=engine 'method.layers=[0:fp16]'"]
