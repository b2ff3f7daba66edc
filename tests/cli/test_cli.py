"""The command line, apart from its refusals: help, `--cfg job`, sweeps, files left on disk, packaging."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.cli import usage
from kvbench.cli.main import main
from kvbench.config.run_config import RunConfig
from kvbench.errors import ModelError
from kvbench.util.confdir import config_groups, group_options

ROOT = Path(__file__).resolve().parents[2]


def _python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """Runs that only note their configuration; `atom` has no model, `kivi` runs out of memory with residual=64."""
    import kvbench.results.tables
    import kvbench.runner.run

    seen: list[Mapping[str, Any]] = []

    def run(checked: RunConfig, begun: Any = None) -> dict[str, Any]:
        config = checked.plain
        seen.append(config)
        if config["method"]["_target_"].endswith("Atom"):
            raise ModelError("no weights\n  hint: model=tiny")
        status = "oom" if config["method"].get("residual") == 64 else "ok"
        return {"status": status, "error": None, "label": config["quantizer"]["name"]}

    monkeypatch.setattr(kvbench.runner.run, "answer_run", run)
    for name in ("table_text", "runs_markdown", "runs_csv"):
        monkeypatch.setattr(kvbench.results.tables, name, lambda rows: "TABLE " + " ".join(r["label"] for r in rows))
    monkeypatch.chdir(tmp_path)
    return seen


def test_help_names_every_group_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group in config_groups():
        for choice in group_options(group):
            assert f"{group}={choice}" in text
    assert "--multirun" in text
    assert "--cfg job" in text
    headings = [line for line in text.splitlines() if line in config_groups()]
    assert headings[:4] == ["method", "quantizer", "model", "dataset"], "the most used ones come first"
    assert sorted(headings) == sorted(config_groups()), "each of them once"


def test_the_help_honours_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = usage.help_text()
    monkeypatch.delenv("COLUMNS", raising=False)
    assert usage.folded(whole) == whole, "without a terminal nothing is broken"
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        for typed in (["--help"], ["--help", "method=cocktail"]):
            assert main(typed) == 0
            text = capsys.readouterr().out
            assert max(map(len, text.splitlines())) <= columns
        assert usage.folded(whole).split() == whole.split(), "nothing is lost"
    assert usage.folded("  a=b  " + "word " * 30).splitlines()[1].startswith("       word"), "under its column"


def test_the_help_has_the_groups_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its order first; a new one behind them."""
    monkeypatch.setattr(usage, "config_groups", lambda: ["zeta", "model", "method"])
    monkeypatch.setattr(usage, "group_text", lambda group, extra: f"<{group} {extra}>")
    assert "\n<method x>\n<model x>\n<zeta x>\ndecoding\n" in usage.help_text(Path("x"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert kvbench.__version__ in capsys.readouterr().out


def test_cfg_job_shows_the_configuration_and_does_nothing(tmp_path: Path) -> None:
    done = _python("-m", "kvbench", "--cfg", "job", "method=kivi", "quantizer=int4", "method.residual=64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "residual: 64" in done.stdout
    assert "name: int4" in done.stdout
    assert "${" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_one_run(runs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["method=kivi", "quantizer=int4"]) == 0
    assert [run["quantizer"]["name"] for run in runs] == ["int4"]
    assert "TABLE int4" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "Hydra leaves no folders behind"


def test_one_run_that_fails_says_so(runs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=atom"]) == 1
    assert "error: no weights" in capsys.readouterr().err
    assert main(["method=kivi", "method.residual=64"]) == 1


def test_a_sweep_goes_on_past_failures_and_ends_with_one_table(
    runs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--multirun", "method=fp16,atom,kivi"]) == 1
    assert len(runs) == 3
    captured = capsys.readouterr()
    assert captured.out.count("TABLE") == 1
    assert "TABLE none int2" in captured.out
    assert "job 2 error: method=atom: no weights" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["sweeps"]
    (folder,) = (tmp_path / "results" / "sweeps").iterdir()
    files = [*(f"job-000{i}.json" for i in range(3)), "manifest.json", "table.csv", "table.md"]
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == files


def test_a_sweep_without_failures(runs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    presets = "quickstart/fp16,quickstart/kivi4,quickstart/kivi2"
    assert main(["--multirun", f"experiment={presets}"]) == 0
    assert "TABLE none int4 int2" in capsys.readouterr().out


def test_a_key_that_the_default_choice_lacks_goes_to_the_jobs(
    runs: list[Mapping[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a b" / "[x],y").mkdir(parents=True)
    line = ["dataset=longbench/qasper,longbench/trec", "dataset.path='a b/[x],y'", "dataset.system=", "model=tiny"]
    assert main(["--multirun", *line]) == 0, capsys.readouterr().err
    assert [run["dataset"]["name"] for run in runs] == ["longbench/qasper", "longbench/trec"]
    assert {run["dataset"]["path"] for run in runs} == {"a b/[x],y"}
    assert {run["dataset"]["system"] for run in runs} == {""}
    assert main(["-m", "method=kivi,logquant", "method.sinks=2,4", "quantizer=int4"]) == 0
    assert [run["method"]["sinks"] for run in runs[2:]] == [2, 4, 2, 4]
    assert main(["-m", "experiment=quickstart/kivi4,quickstart/kivi2", "method.residual=32"]) == 0
    assert [run["method"]["residual"] for run in runs[6:]] == [32, 32]


def test_an_out_of_memory_job_counts_as_failed(runs: list[Mapping[str, Any]]) -> None:
    assert main(["-m", "method=kivi", "method.residual=32,64,128"]) == 1
    assert len(runs) == 3


def test_a_method_from_outside_is_one_yaml_and_one_module(
    runs: list[Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    outside = tmp_path / "mine"
    (outside / "method").mkdir(parents=True)
    (outside / "method" / "outsider.yaml").write_text(
        "# my own method\ndefaults:\n  - override /quantizer@_global_.quantizer: int4\n"
        "_target_: outsider.Outsider\ntakes: [int4]\nresidual: 64\n"
    )
    (outside / "outsider.py").write_text(
        "from dataclasses import dataclass\nfrom kvbench.methods.kivi import Kivi\n\n\n"
        "@dataclass(kw_only=True)\nclass Outsider(Kivi):\n    pace: int = 1\n"
    )
    where = ["--config-dir", str(outside)]
    assert main([*where, "--help"]) == 0
    assert "method=outsider" in capsys.readouterr().out
    assert main([*where, "method=outsider", "method.residual=32"]) == 0
    assert runs[0]["method"]["_target_"] == "outsider.Outsider"
    assert runs[0]["quantizer"]["name"] == "int4"
    assert main([*where, "method=outsider", "method.residual=33"]) == 2
    assert main(["method=outsider"]) == 2


def test_ctrl_c_ends_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kvbench.runner.run

    def interrupted(config: Mapping[str, Any], begun: Any = None) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvbench.runner.run, "answer_run", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(["--multirun", "method=fp16,kivi"]) == 130


def test_the_wheel_has_the_configuration_and_the_bundled_model(tmp_path: Path) -> None:
    """Built from a copy, so that the tree stays clean; by the setuptools of this environment, so offline."""
    pytest.importorskip("setuptools", minversion="77")
    import shutil

    source = tmp_path / "source"
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in ("kvbench", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for path in (ROOT / "kvbench").rglob("*.safetensors"):  # their names are enough
        (source / path.relative_to(ROOT)).touch()
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"kvbench/conf/{path.relative_to(ROOT / 'conf').as_posix()}" in names
    for path in (ROOT / "kvbench").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
    assert not any(name.startswith(("tests/", "conf/", "experiments/")) for name in names)
