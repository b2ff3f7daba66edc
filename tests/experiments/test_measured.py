"""The driver of measured tables: folders by model, settings that a model cannot take, processes, the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import measured
from experiments.fidelity import __main__ as fidelity
from experiments.formats import __main__ as formats
from experiments.measured import Folded, Setting, Stored, Table
from experiments.mini import __main__ as mini
from experiments.runs import RunOutcome
from experiments.stored import markdown_table

SETTINGS = (Setting("fp16", "", "fp16"), Setting("kivi 2", "", "kivi:int2"), Setting("no", "", "kivi:int2_token"))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of three settings whose runs are made up; the last setting is one that no model takes."""
    ran = []
    monkeypatch.setattr(
        measured, "identify", lambda run: ("", "heads of 80") if "int2_token" in run.command else ("id", "")
    )
    monkeypatch.setattr(measured, "execute", lambda run: ran.append(run) or RunOutcome(run, "id", "ok"))

    def fold(stored):
        return Folded(f"{', '.join(stored)}\n", {"rows.txt": "rows"}, {"settings": len(stored)})

    made = Table("none", lambda setting: {"mini": ["dataset=mini"]}, fold, lambda folder: None, lambda *_: ({}, {}))
    return made, ran


def parsed(*given, out="results/mini"):
    top = measured.table_parser("none", "", "results/runs/none", batch=4, limit=2)
    return measured.set_chosen(top, top.parse_args(given), SETTINGS, out)


def test_a_setting_that_a_model_cannot_take_is_named_and_the_others_run(table, tmp_path, capsys):
    made, ran = table
    assert measured.make_table(made, parsed("--out", str(tmp_path), "--device", "cpu"), []) == 0
    assert [run.overrides[:2] for run in ran] == [("method=fp16", "model=tiny"), ("method=kivi", "quantizer=int2")]
    assert {"runtime.device=cpu", "runtime.batch_size=4"} < set(ran[0].overrides)
    assert (tmp_path / "table.md").read_text() == "fp16, kivi 2, no\n" and (tmp_path / "rows.txt").exists()
    told = capsys.readouterr()
    assert told.err == "no: skipped: heads of 80\n" and "kivi 2, mini: ok" in told.out


def test_a_run_that_fails_shows_in_the_exit_status(table, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measured, "execute", lambda run: RunOutcome(run, "", "failed", "out of luck"))
    assert measured.make_table(table[0], parsed("--out", str(tmp_path), "--only", "kivi 2"), []) == 1
    assert "kivi 2, mini: failed: out of luck" in capsys.readouterr().out
    assert measured.make_table(table[0], parsed("--out", str(tmp_path), "--fold-only"), []) == 0


def test_side_by_side_the_first_setting_goes_first_and_the_others_have_processes_with_logs(
    table, tmp_path, monkeypatch, capsys
):
    commands = []

    def call(command, stdout, stderr):
        commands.append(command)
        stdout.write("said")
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(measured.subprocess, "run", call)
    given = ["--jobs", "2", "--runs", str(tmp_path), "--run-only"]
    assert measured.make_table(table[0], parsed(*given), given) == 1
    assert [run.overrides[0] for run in table[1]] == ["method=fp16"]
    (command,) = commands
    assert command[2:] == ["none", *given, "--jobs", "1", "--run-only", "--only", "kivi 2"]
    log = tmp_path / "logs" / "tiny-kivi-2.txt"
    assert log.read_text() == "said" and f"kivi 2: failed, see {log}" in capsys.readouterr().out


def test_another_model_has_a_folder_of_its_own_and_is_named(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = parsed("--model", "llama3.1-8b", "--fold-only", "--write")
    assert arguments.out == Path("results/llama3.1-8b/mini")
    assert measured.make_table(table[0], arguments, []) == 0
    assert (arguments.out / "table.md").read_text() == "Model: llama3.1-8b\n\nfp16, kivi 2, no\n"
    assert measured.home("results/mini/search", "me/model") == Path("results/me_model/mini/search")


@pytest.mark.parametrize(
    ("command", "folders"),
    [
        (mini.parse_mini_options, ("results/mini", "results/llama2-7b/mini")),
        (formats.parse_formats_options, ("results/formats", "results/llama2-7b/formats")),
        (fidelity.parse_fidelity_options, ("results/tiny/fidelity", "results/llama2-7b/fidelity")),
    ],
)
def test_the_commands_take_any_model(command, folders):
    assert (str(command([]).out), str(command(["--model", "llama2-7b"]).out)) == folders
    assert command(["--only"]).chosen == command([]).chosen  # no name: all
    with pytest.raises(SystemExit):
        command(["--only", "no such setting"])


def test_a_table_that_rests_on_less_goes_to_the_trials(tmp_path):
    folded = Folded("text\n", {"rows.txt": ""}, {"prompts": 2})
    where = tmp_path / "out"
    assert measured.keep_measured_table(folded, where, measured.Choice(), lambda folder: {"prompts": 4}) == 1
    assert (tmp_path / "trials" / "out" / "table.md").exists() and not where.exists()
    assert measured.keep_measured_table(folded, where, measured.Choice(), lambda folder: {"prompts": 2}) == 0
    (tmp_path / "file").write_text("")
    assert measured.keep_measured_table(folded, tmp_path / "file", measured.Choice(), lambda folder: None) == 2


def test_rows_are_those_of_each_tasks_first_samples(monkeypatch, tmp_path):
    rows = {f"{task}@1024/{i}": {"id": f"{task}@1024/{i}"} for task in ("copy", "repeat") for i in range(3)}
    store = type(
        "Store", (), {"samples": lambda self: type("Samples", (), {"rows": rows}), "environment": lambda self: None}
    )
    monkeypatch.setattr(measured, "RunStore", lambda folder, name: store())
    monkeypatch.setattr(measured, "identify", lambda run: ("id", ""))
    for data in ({"limit": 2}, {"limit": None, "options": {"limit": 2}}):
        monkeypatch.setattr(measured, "composed", lambda overrides, data=data: {"dataset": data})
        found, env = measured.by_id(tmp_path, measured.Run((), "tiny", "mini"))
        assert list(found) == ["copy@1024/0", "copy@1024/1", "repeat@1024/0", "repeat@1024/1"] and env == {}
    assert Stored({"mini": found}).env == {}


def test_tables_in_markdown():
    assert markdown_table(["", "a", "b"], [["x", "1", ""]]) == ["| | a | b |", "|:--|--:|--:|", "| x | 1 | |"]
    assert markdown_table(["a", "b"], [], "-")[1] == "|---|---|"
