"""`python -m kvbench.report` reads files and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench import report
from kvbench.run import run
from tests.run_support import config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return directory, [run(config(directory, name))["run_id"] for name in ("fp16", "kivi")]


def test_list(runs, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory)]) == 0
    said = capsys.readouterr().out
    assert all(id_ in said for id_ in ids)
    assert "kivi int2" in said
    assert "4/4" in said


def test_show_by_the_beginning_of_an_id(runs, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory), "--show", ids[0], ids[1][11:15]]) == 0
    said = capsys.readouterr().out
    assert "reading packed codes" in said
    assert "answer NLL" in said
    for form in ("markdown", "csv"):
        assert report.main(["--results", str(directory), "--show", ids[1], "--format", form]) == 0
        assert "kivi int2" in capsys.readouterr().out


def test_what_is_wrong_is_said(runs, tmp_path, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory), "--show", "nothing"]) == 1
    assert report.main(["--results", str(directory), "--show", ids[0][:5]]) == 1
    assert report.main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "no run nothing" in said
    assert "is the beginning of 2 runs" in said
    assert "no runs under" in said


def test_an_unfinished_run_is_listed(runs, tmp_path, capsys):
    from kvbench.results.store import RunStore

    store = RunStore(tmp_path, "0123456789-0123456789")
    with store.hold():
        store.start(config(tmp_path))
    assert report.main(["--results", str(tmp_path)]) == 0
    assert "unfinished" in capsys.readouterr().out
    assert report.main(["--results", str(tmp_path), "--show", "0123"]) == 1


def test_needs_no_torch(runs):
    directory, _ = runs
    code = (
        "import sys; from kvbench import report;"
        f"report.main(['--results', {str(directory)!r}]);"
        "sys.exit(bool({'torch', 'hydra', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
