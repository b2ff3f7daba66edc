"""`python -m kvbench.report` reads files and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from kvbench.cli import report
from kvbench.results import store as store_module
from kvbench.results.samples import UnreadableError
from kvbench.results.store import RunStore
from kvbench.runner import sources
from kvbench.runner.run import answer_run
from tests.run_support import config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return directory, [answer_run(config(directory, name))["run_id"] for name in ("fp16", "kivi")]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal on which no name is cut into lines."""
    monkeypatch.setenv("COLUMNS", "200")


def test_list(runs, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert all(id_ in printed for id_ in ids)
    assert "kivi int2" in printed
    assert "4/4" in printed
    assert report.main(["--results", str(directory), "--format", "csv"]) != 0  # a list has one form
    assert "--format=csv: needs --show or --compare" in capsys.readouterr().err


def test_show_by_the_beginning_of_an_id(runs, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory), "--show", ids[0], ids[1][11:15]]) == 0
    printed = capsys.readouterr().out
    assert "reads packed codes" in printed
    assert "answer NLL" in printed
    for form in ("markdown", "csv"):
        assert report.main(["--results", str(directory), "--show", ids[1], "--format", form]) == 0
        assert "kivi int2" in capsys.readouterr().out


def test_a_whole_id_names_its_run_even_where_another_id_begins_with_it(runs, tmp_path, capsys):
    ids = copies(runs, tmp_path, 2)
    longer = tmp_path / f"{ids[1]}0"
    shutil.copytree(tmp_path / ids[1], longer)
    assert report.main(["--results", str(tmp_path), "--show", ids[1]]) == 0
    output = capsys.readouterr().out
    assert str(tmp_path / ids[1]) in output and str(longer) not in output
    assert report.main(["--results", str(tmp_path), "--show", ids[1][:-1]]) == 1
    assert "matches 3 runs" in capsys.readouterr().err


def test_what_is_wrong_is_said(runs, tmp_path, capsys):
    directory, ids = runs
    assert report.main(["--results", str(directory), "--show", "nothing"]) == 1
    assert report.main(["--results", str(directory), "--show", ids[0][:5]]) == 1
    assert report.main(["--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert "no run nothing" in printed
    assert "matches 2 runs" in printed
    assert "there are no runs in" in printed


def test_an_unfinished_run_is_listed(runs, tmp_path, capsys):
    store = RunStore(tmp_path, "0123456789-0123456789")
    with store.hold():
        store.start(config(tmp_path))
    assert report.main(["--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "unfinished" in printed
    assert "kivi int2" in printed and "?" not in printed  # as its configuration has it
    assert report.main(["--results", str(tmp_path), "--show", "0123"]) == 1


def test_needs_no_torch(runs):
    directory, _ = runs
    code = (
        "import sys; from kvbench import report;"
        f"report.main(['--results', {str(directory)!r}]);"
        f"report.main(['--results', {str(directory)!r}, '--html', {str(directory / 'report.html')!r}]);"
        "sys.exit(bool({'torch', 'hydra', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def copies(runs, tmp_path, count):
    """Runs of kivi that differ in alpha and beta alone."""
    directory, ids = runs
    metrics = json.loads((directory / ids[1] / "metrics.json").read_text())
    for number in range(count):
        store = RunStore(tmp_path, f"0123456789-{number:010}")
        settings = config(tmp_path, method={"alpha": 0.1 * (number // 2), "beta": number % 2, "preset": "mine"})
        with store.hold():
            store.start(settings)
            content = {**metrics, "run_id": store.run_id, "label": "mine int2"}
            content["config"] = {**metrics["config"], "method": settings["method"]}
            if number:
                store.write_metrics(content)
    return [f"0123456789-{number:010}" for number in range(count)]


def test_runs_of_one_name_are_told_apart_by_their_settings(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ids = copies(runs, tmp_path, 4)
    assert report.main(["--results", str(tmp_path)]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    wide = " dtype=float32 alpha="  # the first has no environment yet, so its storage is not known
    expected = (" toy toy ", f"{wide}0.0 ", f"{wide}0.1 ", f"{wide}0.1 ")
    for run_id, settings in zip(ids, expected, strict=True):
        assert lines[run_id].startswith(f"mine int2{settings}"), lines
    assert "unfinished" in lines[ids[0]] and " ok " in lines[ids[1]]
    assert report.main(["--results", str(tmp_path), "--show", *ids[1:]]) == 0
    printed = capsys.readouterr().out
    assert "mine int2 dtype=float32 alpha=0.1 beta=1" in printed
    assert report.main(["--results", str(tmp_path), "--compare", ids[2], ids[3]]) == 0
    printed = capsys.readouterr().out
    assert all(f"mine int2 dtype=float32 beta={beta}, toy, toy" in printed for beta in (0, 1))


def test_the_code_that_made_the_samples_is_a_column(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    directory, ids = runs
    content = json.loads((directory / ids[1] / "metrics.json").read_text())
    (now,) = content["code"]
    kinds = ({now: 4}, {now: 2, "unknown": 2}, {"unknown": 4}, None)
    for number, code in enumerate(kinds):
        store = RunStore(tmp_path, f"0123456789-{number:010}")
        with store.hold():
            store.start(config(tmp_path))
            metrics = {**content, "run_id": store.run_id, "code": code}
            store.write_metrics({key: value for key, value in metrics.items() if key != "code" or code})
    assert report.main(["--results", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-1] == "code"
    assert [" ".join(line[-2:]) for line in lines[2:]] == [f"KiB {now[:6]}", "2 kinds", "KiB unknown", "KiB -"]
    names = [f"0123456789-{number:010}" for number in range(4)]
    assert report.main(["--results", str(tmp_path), "--show", *names]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "kivi int2 dtype=float32: the samples were made by different versions of the code" in message
    assert f"code {now} (2 samples), unknown (2 samples)" in message


@pytest.mark.parametrize("content", ['{"status":"ok"}', "[]", "{", "[" * 50_000, "null"])
def test_a_foreign_metrics_file_costs_no_other_run(runs, tmp_path, capsys, content):
    ids = copies(runs, tmp_path, 3)
    foreign = tmp_path / ids[1] / "metrics.json"
    foreign.write_text(content)
    for arguments, told in ((["--list"], True), (["--show", ids[2]], False)):
        assert report.main(["--results", str(tmp_path), *arguments]) == 0
        captured = capsys.readouterr()
        assert (f"skipped: {foreign}" in captured.err) == told
        assert ids[2] in captured.out and ids[1] not in captured.out
    assert report.main(["--results", str(tmp_path), "--show", ids[1], ids[2]]) == 1
    assert f"error: {foreign}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "loop"])
def test_samples_that_cannot_be_read_cost_no_other_run(runs, tmp_path, capsys, kind):
    ids = copies(runs, tmp_path, 2)
    path = tmp_path / ids[0] / "samples.jsonl"
    path.mkdir() if kind == "folder" else path.symlink_to(path.name)
    assert report.main(["--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert str(path) in captured.err and ids[0] in captured.out and ids[1] in captured.out
    assert report.main(["--results", str(tmp_path), "--compare", *ids]) == 1
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(UnreadableError, match="move the file away"):
        RunStore(tmp_path, ids[0]).recover()


def test_names_are_escaped_wherever_they_are_printed(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    odd = "mine\x1b[31m\n\ud83d\u202e"
    ids = copies(runs, tmp_path, 3)
    for name in ids[1:]:
        path = tmp_path / name / "metrics.json"
        content = json.loads(path.read_text())
        content["label"], content["config"]["dataset"] = odd, odd
        content["scores"] = {odd if key == "first" else key: entry for key, entry in content["scores"].items()}
        path.write_text(json.dumps(content))
    show = ["--show", *ids[1:]]
    for arguments in (
        ["--list"],
        show,
        [*show, "--format", "csv"],
        [*show, "--format", "markdown"],
        ["--compare", *ids[1:]],
    ):
        assert report.main(["--results", str(tmp_path), *arguments]) == 0
        printed = capsys.readouterr().out
        printed.encode()
        assert not set(printed) & set("\x1b\u202e"), arguments
        assert "mine\\x1b[31m" in printed and "ud83d\\u202e" in printed, arguments


def test_thousands_of_runs_digest_the_sources_once_and_read_each_file_once(runs, tmp_path, capsys, monkeypatch):
    ids = copies(runs, tmp_path, 6)
    counts = Counter()

    def counted(name, real):
        return lambda *given, **named: counts.update([name]) or real(*given, **named)

    monkeypatch.setattr(sources, "code", counted("sources", sources.code))
    monkeypatch.setattr(store_module, "_read_json", counted("json", store_module._read_json))
    monkeypatch.setattr(RunStore, "config", counted("yaml", RunStore.config))
    assert report.main(["--results", str(tmp_path), "--list"]) == 0
    assert counts == {"sources": 1, "json": 6, "yaml": 6}
    counts.clear()
    assert report.main(["--results", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert counts["sources"] == 1 and counts["yaml"] <= 7 and counts["json"] == 6
    counts.clear()
    assert report.main(["--results", str(tmp_path), "--show", ids[2]]) == 0
    assert counts["yaml"] <= 3, "the other runs are not read"
