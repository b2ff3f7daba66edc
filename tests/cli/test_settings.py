"""``setting=`` on the main command line: the same configuration and run id as what it stands for, and its sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import settings
from kvbench.cli.compose import Composer
from kvbench.cli.main import main
from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError

Config = Mapping[str, Any]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """Runs that only note their configuration."""
    import kvbench.results.tables
    import kvbench.runner.run

    seen: list[Config] = []

    def run(config: RunConfig, begun: Any = None) -> dict[str, Any]:
        seen.append(config.plain)
        return {"status": "ok", "error": None, "label": config.plain["method"]["preset"]}

    monkeypatch.setattr(kvbench.runner.run, "answer_run", run)
    for name in ("table_text", "runs_markdown", "runs_csv"):
        monkeypatch.setattr(kvbench.results.tables, name, lambda rows: "TABLE " + " ".join(r["label"] for r in rows))
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("setting", "typed"),
    [
        pytest.param("fp16", ["method=fp16"], marks=pytest.mark.slow),
        pytest.param("kivi:int4_g128", ["method=kivi", "quantizer=int4_g128"], marks=pytest.mark.slow),
        pytest.param(
            "kivi:int4:residual=64",
            ["method=kivi", "quantizer=int4", "method.residual=64"],
            marks=pytest.mark.slow,
        ),
        ("kivi:int2:sinks=2,quantizer.key.group_size=64",
         ["method=kivi", "quantizer=int2", "method.sinks=2", "quantizer.key.group_size=64"]),
        ("cocktail:split=10/30/60:encoder=bm25", ["method=cocktail", "method.split=[10,30,60]", "method.encoder=bm25"]),
    ],
)  # fmt: skip
def test_a_setting_runs_what_it_stands_for(setting: str, typed: list[str], runs: list[Config]) -> None:
    assert main([f"setting={setting}", "dataset.limit=3"]) == 0
    assert main([*typed, "dataset.limit=3"]) == 0
    assert runs[0] == runs[1]  # the run id and the label are made of this


def test_a_sweep_gives_each_method_options_of_its_own(
    runs: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = "setting=fp16,kivi:int4:residual=64,cocktail:split=[10,30,60]:encoder=bm25"
    assert main(["--multirun", swept, "dataset.limit=2,3", "hydra.sweep.dir=record"]) == 0
    captured = capsys.readouterr()
    chosen = [
        (run["method"]["preset"], run["quantizer"]["name"], run["method"].get("residual"), run["dataset"]["limit"])
        for run in runs
    ]
    names = [("fp16", "none", None), ("kivi", "int4", 64), ("cocktail", "none", None)]
    assert chosen == [(*name, limit) for name in names for limit in (2, 3)]
    assert [run["method"].get("split") for run in runs][-1] == [10, 30, 60]
    assert "setting" not in runs[0]
    assert "job 3/6: setting=kivi:int4:residual=64 dataset.limit=2" in captured.err
    record = json.loads((tmp_path / "record" / "job-0002.json").read_text())
    assert record["overrides"] == ["setting=kivi:int4:residual=64", "dataset.limit=2"]


def test_a_sweep_with_methods_from_a_folder(runs: list[Config], tmp_path: Path) -> None:
    (tmp_path / "extra" / "method").mkdir(parents=True)
    text = "# KIVI with a longer window\n_target_: kvbench.methods.kivi.Kivi\ntakes: [int4]\nresidual: 256\n"
    defaults = "defaults:\n  - override /quantizer@_global_.quantizer: int4\n"
    (tmp_path / "extra" / "method" / "mine.yaml").write_text(defaults + text)
    assert main(["--multirun", "--config-dir", "extra", "setting=fp16,mine,mine:residual=64"]) == 0
    assert [(run["method"]["preset"], run["method"].get("residual")) for run in runs] == [
        ("fp16", None), ("mine", 256), ("mine", 64)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["setting=fp16,kivi"], "add --multirun"),
        (["setting=kivi", "method.residual=64"], "kivi:residual=64"),
        (["setting=kivi:int4", "quantizer=int2"], "quantizer cannot be set as well"),
        (["setting=kivi", "method=kivi"], "method cannot be set as well"),
        (["setting=fp16", "setting=kivi"], "given twice"),
        (["--multirun", "setting=kivi,kivi"], "lists kivi twice"),
        (["--multirun", "setting=fp16,kivy:int4"], "did you mean 'kivi'"),
        (["--multirun", "setting=fp16,kivi:int7"], "no such quantizer"),
        (["--multirun", "setting=fp16,kivi:residuel=32"], "did you mean 'residual'"),
        (["--multirun", "setting=kivi:residual=32,64"], "begins with a value"),
        (["setting=kivi:int2:residual=33"], "multiple of the key group"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(
    words: list[str], message: str, runs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not runs


def test_settings_count_among_the_jobs_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_MAX_JOBS", "3")
    with pytest.raises(ConfigError, match="setting: 2"):
        Composer().check(["setting=fp16,kivi", "dataset.limit=1,2"], multirun=True)


def test_the_whole_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--package", "method", "setting=kivi:int4:residual=64"]) == 0
    assert "residual: 64" in capsys.readouterr().out


def test_a_map_of_formats_is_no_sweep_although_the_shell_removes_its_quotes():
    texts = ["method=kivi", "method.layers=0-1:fp16,2-:int4"]
    assert settings.variants(texts, multirun=False) == [["method=kivi", "method.layers=[0-1:fp16,2-:int4]"]]
    for same in ("method.layers=-1:fp16", "method.layers=[0:fp16,1:int4]", 'method.layers="0:fp16,1:int4"', "a=1,2"):
        assert settings.variants([same], multirun=False) == [[same]]
    assert settings.variants(texts, multirun=True) == [texts]


def test_fp16_runs_as_it_is_beside_methods_with_a_quantizer(runs: list[Config]) -> None:
    assert main(["--multirun", "method=fp16,kivi", "quantizer=int2,int4"]) == 0
    ran = [(config["method"]["preset"], config["quantizer"]["name"]) for config in runs]
    assert sorted(ran) == [("fp16", "none"), ("kivi", "int2"), ("kivi", "int4")]


def test_methods_that_do_not_take_the_quantizer_are_refused_together(runs: list[Config], capsys: Any) -> None:
    assert main(["--multirun", "method=fp16,kivi,atom,kvquant", "quantizer=int2"]) == 2
    said = capsys.readouterr().err
    assert not runs
    assert "quantizer=int2: is not a quantizer of method=atom,kvquant; nothing was started" in said
    assert "method=fp16,kivi" in said


@pytest.mark.parametrize("multirun", [False, True])
@pytest.mark.parametrize("text", ["{question}", 'Say "{a}", then {b}:', '"{question}"', "[{a}]"])
def test_a_template_needs_no_quotes_of_its_own(text: str, multirun: bool) -> None:
    from kvbench.cli.overrides import template

    word = template(f"dataset.template={text}")
    (job,) = Composer().check(["dataset=records", "dataset.path=README.md", word], multirun)
    made = Composer().plain(job)
    assert made["dataset"]["template"] == (text if text != '"{question}"' else "{question}")
    assert template("dataset.fields={question:q}") == "dataset.fields={question:q}"
    assert template("dataset.template=null") == "dataset.template=null"


def test_keys_are_checked_without_a_look_at_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keys exist depends on the choices alone; the model's files are read once, for the job itself."""
    from kvbench.cli import compose

    read, filled = [], compose.fill_from_checkpoint
    monkeypatch.setattr(compose, "_COMPOSED", {})
    monkeypatch.setattr(compose, "fill_from_checkpoint", lambda *given: read.append(given[2]) or filled(*given))
    with pytest.raises(ConfigError, match=r"method\.residul"):
        Composer().check(["method=kivi", "model=tiny", "method.residul=3"])
    assert read == []
    Composer().check(["method=kivi", "model=tiny", "method.residual=64"])
    assert read == [["method=kivi", "model=tiny", "method.residual=64"]]
