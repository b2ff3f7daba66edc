"""Refusals by the configuration alone of what cannot run here: packages, a GPU, files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.config.prerequisites import check_here, check_launcher
from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError
from kvbench.util import requirements
from kvbench.util.requirements import Package, check_packages, exists, has_gpu, installed
from tests.run_support import config


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without optional packages."""
    find = importlib.util.find_spec
    missing = ("optimum", "hqq", "bm25s", "sentence_transformers", "httpx", "wandb", "jieba", "rouge_score", "triton")
    missing = (*missing, "gptqmodel", "accelerate", "hydra_plugins", "cuda")

    def find_spec(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(name) if "." in name else ValueError(name)
        return find(name, package)

    for name in [name for name in sys.modules if name.split(".")[0] in missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(requirements.importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("method=hf_quantized", "method.backend=quanto: needs the package optimum.quanto"),
        ("method=hf_quantized method.backend=hqq", "kvbench[hf]"),
        ("method=cocktail", "method.encoder=contriever: needs the package sentence_transformers"),
        ("method=cocktail method.encoder=bm25", "kvbench[retrieval]"),
        ("method=cocktail method.encoder=openai", "httpx"),
        ("method=quantspec method.draft=cocktail", "sentence_transformers"),
        ("logger=wandb", "run pip install wandb, or set logger=csv"),
        ("model=llama2-7b model.requires=gptqmodel", "gptqmodel"),
        ("dataset=longbench model=llama2-7b", "jieba"),
        ("dataset=multi_lexsum model=llama3.1-8b", "rouge_score"),
        ("--multirun launcher=joblib method=fp16,kivi", "run pip install hydra-joblib-launcher, or set launcher=local"),
        ("launcher=submitit", "kvbench[launch]"),
        ("runtime.kernels=triton", "runtime.kernels=auto"),
    ],
)
def test_a_missing_package_is_said_before_anything_is_loaded(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda config: pytest.fail("was started"))
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_from_python_is_refused_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.runner.run import answer_run

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"runtime\.device=cuda: no GPU is visible on this machine"):
        answer_run(config(tmp_path / "runs", "fp16", runtime={"device": "cuda"}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"device": "cuda:1"}, "runtime.device=cuda:1"),
        ({"device": "auto", "device_map": "auto"}, "runtime.device_map"),
        ({"device": "auto", "kernels": "cuda"}, "runtime.kernels=cuda"),
        ({"device": "cpu", "kernels": "triton"}, "runtime.kernels=triton"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    runtime: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    checked = checked_config(config(tmp_path, "fp16", runtime=runtime))
    with pytest.raises(ConfigError, match=said):
        check_here(checked)
    check_here(checked, "submitit")  # its jobs run elsewhere
    check_here(checked_config(config(tmp_path, "fp16", runtime={"device": "cpu", "kernels": "reference"})))


def test_a_gpu_is_looked_for_by_its_files_and_only_their_absence_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(requirements, "GPU_FILES", (f"{tmp_path}/nvidia[0-9]*", f"{tmp_path}/kfd"))
    assert not has_gpu()
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu()
    (tmp_path / "nvidia0").touch()
    assert has_gpu()
    for hidden in ("", "-1", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert has_gpu()
    monkeypatch.setattr(requirements, "GPU_FILES", ())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert has_gpu()


def test_packages_that_are_there() -> None:
    assert installed("json")
    assert installed("xml.dom")
    assert not installed("json.no_such")
    assert not installed("no_such_parent.child")
    check_packages([Package("json", "key", "value", "hint")])
    with pytest.raises(ConfigError, match=r"key=value: needs the package no_such, .*\n  hint: type this"):
        check_packages([Package("json", "k", "v", "h"), Package("no_such", "key", "value", "type this")])


def test_a_launcher_of_sweeps_is_none_of_a_single_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed", lambda module: True)
    check_launcher("local", multirun=False)
    check_launcher("joblib", multirun=True)
    with pytest.raises(ConfigError, match="add --multirun"):
        check_launcher("submitit", multirun=False)


def test_paths_that_cannot_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert exists("here", "k")
    assert not exists("there", "k")
    assert not exists("here/there", "k")
    for path in ("x" * 300, "loop", "~nobody_of_this_name/x", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be accessed"):
            exists(path, "key")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dataset=gsm8k dataset.path=missing", "dataset.path=missing: does not exist"),
        ("dataset=gsm8k dataset.path=''", "must name a file or folder"),
        ("dataset=pg19", "allowed: 16 to 4006"),
        ("dataset=multi_lexsum", "dataset.lengths=[4006]"),
        ("dataset=pg19 model=llama3.1-8b dataset.lengths=[127501]", "model.prompt_limit=127500"),
        ("dataset=pg19 dataset.lengths=[4000] decoding.max_new_tokens=97", "allowed: 16 to 3999"),
        ("dataset=mini dataset.lengths=[2048,8192]", "dataset.lengths=8192: exceeds the model's limit"),
        ("dataset=mini dataset.lengths=[16384] model=llama2-7b", "dataset.lengths=[8192]"),
        ("dataset=perplexity/mini_text dataset.window=4097", "dataset.window=4096"),
        ("dataset=perplexity/mini_text method=snapkv", "dataset.prefill=1024"),
        ("dataset=perplexity/mini_text method=kivi dataset.mode=fp16", "method=fp16"),
        ("dataset=gsm8k dataset.max_new_tokens=4096", "dataset.max_new_tokens=4096: leaves no room for a prompt"),
        ("model.path=bare", "set model.weights=random to fill"),
        ("model.path=", "must name a folder"),
        ("model.hub_id=a/b/c model.path=null", "is not a valid repository name"),
        ("runtime.device=cuda", "no GPU is visible on this machine"),
        ("runtime=fast", "no GPU is visible on this machine"),
    ],
)
def test_what_does_not_fit_or_is_not_there_is_refused_from_the_configuration(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(
        '{"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 4096}'
    )
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda config: pytest.fail("was started"))
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


@pytest.mark.parametrize(
    "line",
    [
        "dataset=pg19 dataset.lengths=[4006] dataset.path=texts",
        "dataset=mini dataset.lengths=[4096]",
        "dataset=mini dataset.lengths=[8192] model=llama2-7b",
        "dataset=perplexity/mini_text dataset.window=4096",
        "dataset=perplexity/mini_text method=snapkv dataset.prefill=65 method.budget=64",
        "dataset=longbench/qasper dataset.path=texts dataset.max_new_tokens=4096 decoding.max_new_tokens=4095",
    ],
)
def test_what_just_fits_is_started(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def run(config: Any, begun: Any = None) -> dict[str, Any]:
        started.append(config)
        return {"status": "ok"}

    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    monkeypatch.setattr("kvbench.runner.run.answer_run", run)
    monkeypatch.setattr("kvbench.results.tables.table_text", lambda rows: "")
    assert main(line.split()) == 0, capsys.readouterr().err
    assert len(started) == 1


def test_showing_a_configuration_needs_no_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["runtime=fast", "--cfg", "job"]) == 0
    assert "device: cuda" in capsys.readouterr().out
