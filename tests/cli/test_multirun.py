"""Sweeps that are interrupted, continued or written to a full disk: nothing is lost, and only what is missing runs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import multirun, plan, unit
from kvbench.cli.main import main
from kvbench.results import ranking, sweeps
from kvbench.results.sweeps import Sweep
from kvbench.util import atomic

GRID = ["--multirun", "method=kivi", "method.residual=32,64,96", "runtime.device=cpu", "logger=none"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs without a model: a list of their residuals, and a function that is called before each."""
    seen: list[int] = []

    def run(config: Any, begun: Callable[[str], None] | None = None) -> dict[str, Any]:
        residual = config["method"]["residual"]
        if begun is not None:
            begun(f"run-{residual}")
        for act in run.before:
            act(residual)
        seen.append(residual)
        metrics = {**ranking.failed(config, ""), "run_id": f"run-{residual}", "status": "ok", "error": None}
        return {**metrics, "run_dir": str(tmp_path / "results" / "runs" / f"run-{residual}")}

    def composed(texts: list[str], extra: Path | None) -> dict[str, Any]:
        given = dict(text.split("=", 1) for text in texts)
        config = {group: {"name": group} for group in ("model", "dataset", "decoding", "runtime")}
        method = {"_target_": "kvbench.methods.kivi.Kivi", "residual": int(given.get("method.residual", 0))}
        return {**config, "method": {**method, "preset": given["method"]}, "quantizer": {"name": "int2"}}

    run.before, run.seen = [], seen  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.cli.job.configuration", composed)
    monkeypatch.setattr("kvbench.cli.job.composed", composed)  # each composition by Hydra takes a while
    monkeypatch.setattr("kvbench.cli.compose.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("kvbench.runner.run.answer_run", run)
    return run


def only(root: Path) -> Sweep:
    (folder,) = (root / "results" / "sweeps").iterdir()
    return Sweep.open(folder)


def test_the_manifest_is_there_before_the_first_job(runs: Any, tmp_path: Path) -> None:
    states: list[list[str]] = []
    runs.before.append(lambda residual: states.append([entry.state for entry in only(tmp_path).progress()]))
    assert main(GRID) == 0
    assert states == [["running", "missing", "missing"], ["done", "running", "missing"], ["done", "done", "running"]]
    manifest = only(tmp_path).manifest
    assert manifest.command == tuple(GRID) and manifest.launcher == "local"
    assert [job.label for job in manifest.jobs] == ["residual=32", "residual=64", "residual=96"]
    assert manifest.jobs[1].overrides == ("method=kivi", "method.residual=64", "runtime.device=cpu", "logger=none")
    assert only(tmp_path).counts() == {"done": 3, "running": 0, "failed": 0, "missing": 0}
    assert not only(tmp_path).driven()


def test_the_table_is_rewritten_as_jobs_end(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "SHARE", 1e9)  # however long it takes
    lines: list[int] = []

    def count(residual: int) -> None:
        table = only(tmp_path).folder / "table.csv"
        lines.append(len(table.read_text().splitlines()) - 1 if table.exists() else 0)

    runs.before.append(count)
    assert main(GRID) == 0
    assert lines == [0, 1, 2]
    assert len((only(tmp_path).folder / "table.csv").read_text().splitlines()) == 4


def test_a_table_that_takes_long_is_not_rewritten_by_every_job(runs: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "table.md").write_text("before")
    (folder / ".table.seconds").write_text("1000")
    plan.record(folder, 0, {"status": "ok", "number": 0, "overrides": [], "message": ""})
    unit.refresh(folder)
    assert (folder / "table.md").read_text() == "before"


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(runs: Any, tmp_path: Path, capsys: Any) -> None:
    def interrupt(residual: int) -> None:
        if residual == 64:
            raise KeyboardInterrupt

    runs.before.append(interrupt)
    assert main(GRID) == 130
    captured = capsys.readouterr()
    name = only(tmp_path).manifest.id
    assert f"interrupted; to run what is missing: python -m kvbench --resume {name}" in captured.err
    assert "3 jobs: 1 ok" in captured.err and "kivi int2" in captured.out
    assert [entry.state for entry in only(tmp_path).progress()] == ["done", "missing", "missing"]
    assert "kivi int2" in (only(tmp_path).folder / "table.md").read_text()

    runs.before.clear()
    assert main(["--resume", name]) == 0
    captured = capsys.readouterr()
    assert f"sweep {name}: continued; 1 done, 2 missing" in captured.err
    assert runs.seen == [32, 32, 64, 96], "a stored run adds nothing but is looked at: its code may have changed"
    assert only(tmp_path).counts()["done"] == 3


def test_the_same_command_continues_its_sweep_and_another_begins_one(runs: Any, tmp_path: Path, capsys: Any) -> None:
    assert main(GRID) == 0
    first = only(tmp_path).manifest
    assert main(GRID) == 0
    assert only(tmp_path).manifest == first
    assert main([*GRID, "dataset.limit=3"]) == 0
    assert len(list((tmp_path / "results" / "sweeps").iterdir())) == 2
    assert main([*GRID, "hydra.sweep.dir=mine"]) == 0
    mine = Sweep.open(tmp_path / "mine")
    assert main([*GRID, "hydra.sweep.dir=mine"]) == 0
    assert Sweep.open(tmp_path / "mine").manifest == mine.manifest
    assert main([*GRID, "dataset.limit=3", "hydra.sweep.dir=mine"]) == 0
    assert Sweep.open(tmp_path / "mine").manifest.token != mine.manifest.token
    capsys.readouterr()


def test_a_sweep_in_a_folder_of_its_own_is_named_by_its_path(
    runs: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(residual: int) -> None:
        if residual == 64:
            raise KeyboardInterrupt

    runs.before.append(interrupt)
    assert main([*GRID, "hydra.sweep.dir=mine"]) == 130
    assert f"python -m kvbench --resume {tmp_path / 'mine'}" in capsys.readouterr().err
    runs.before.clear()
    assert main(["--resume", str(tmp_path / "mine")]) == 0
    assert Sweep.open(tmp_path / "mine").counts()["done"] == 3
    assert main(["--resume", "./mine"]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["--resume", str(tmp_path / "mine")]) != 0
    assert "was started in another working folder" in capsys.readouterr().err


def test_one_job_is_not_called_jobs(runs: Any, tmp_path: Path, capsys: Any) -> None:
    assert main(["--multirun", "method=kivi", "method.residual=32", "runtime.device=cpu", "logger=none"]) == 0
    printed = capsys.readouterr().err
    assert ": 1 job; `python -m kvbench.report" in printed and "\n1 job: 1 ok\n" in printed


def test_a_call_that_ends_leaves_the_mark_of_another_that_continues_the_sweep(
    runs: Any, tmp_path: Path, capsys: Any
) -> None:
    def continue_it(residual: int) -> None:
        (only(tmp_path).folder / sweeps.DRIVER).write_text(json.dumps({**sweeps.here(), "pid": 1}))

    runs.before.append(continue_it)
    assert main(GRID) == 0
    assert (only(tmp_path).folder / sweeps.DRIVER).exists()
    runs.before.clear()
    assert main(GRID) == 0
    assert not (only(tmp_path).folder / sweeps.DRIVER).exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume ID"),
        (["--resume", "nothing"], "there is no sweep nothing in results/sweeps"),
        (["--resume", "x", "method=kivi"], "nothing else can be set"),
        (["--with-fp16", "method=kivi"], "add --multirun"),
    ],
)
def test_doors_of_sweeps_say_what_they_need(words: list[str], message: str, runs: Any, capsys: Any) -> None:
    assert main(words) != 0
    assert message in capsys.readouterr().err
    assert not runs.seen


def test_a_reference_is_a_job_of_the_sweep(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods: list[str] = []

    def run(config: Any, begun: Any = None) -> dict[str, Any]:
        methods.append(config["method"]["preset"])
        return {"status": "ok", "error": None, "rank": 0}

    monkeypatch.setattr("kvbench.runner.run.answer_run", run)
    assert main(["--multirun", "--with-fp16", "method=kivi,h2o", "logger=none"]) == 0
    assert methods == ["fp16", "kivi", "h2o"]
    assert [job.label for job in only(tmp_path).manifest.jobs] == methods


def full(name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the disk full for the first writes of a file."""
    real, refused = atomic.replace_file, []

    def write(path: Path, data: bytes) -> None:
        if path.name == name and len(refused) < times:
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(atomic, "replace_file", write)
    return refused


@pytest.mark.parametrize("name", ["job-0001.json", "table.md", "table.csv", "running-0001.json", "driver.json"])
def test_a_disk_that_is_full_for_a_moment_loses_nothing(
    name: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    refused = full(name, 1, monkeypatch)
    assert main(GRID) == 0
    printed = capsys.readouterr().err
    assert refused == [name]
    assert runs.seen == [32, 64, 96]
    assert "3 jobs: 3 ok" in printed
    assert only(tmp_path).counts()["done"] == 3
    assert len((only(tmp_path).folder / "table.csv").read_text().splitlines()) == 4
    assert ("job 2: its record cannot be written" in printed) == (name == "job-0001.json")


def test_a_disk_that_stays_full_leaves_the_job_to_the_next_call(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with monkeypatch.context() as patch:
        full("job-0001.json", 99, patch)
        assert main(GRID) == 1
    captured = capsys.readouterr()
    assert "3 jobs: 3 ok" in captured.err, "this process still knows what ended"
    assert f"python -m kvbench --resume {only(tmp_path).manifest.id}" in captured.err
    assert only(tmp_path).counts() == {"done": 2, "running": 0, "failed": 0, "missing": 1}
    assert main(GRID) == 0
    assert only(tmp_path).counts()["done"] == 3


def test_no_job_starts_if_the_manifest_cannot_be_written(
    runs: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    full("manifest.json", 99, monkeypatch)
    assert main(GRID) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not runs.seen


@pytest.mark.slow
def test_jobs_of_other_processes_that_are_done_are_not_launched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plan.TOKEN, "")
    data = ["dataset=mini/key_value_hex", "dataset.lengths=[512]", "decoding.max_new_tokens=1", "runtime.device=cpu"]
    texts = ["method=fp16,kivi", "dataset.limit=1", *data, "logger=none", "launcher=joblib"]
    jobs = [[f"method={name}", "dataset.limit=1", *data, "logger=none"] for name in ("fp16", "kivi")]
    call = multirun.prepare_sweep(["--multirun", *texts], texts, jobs)
    assert [job.number for job in call.todo] == [0, 1]
    unit.forget()
    unit.run_unit(plan.encoded([call.todo[0]]).strip("'"), call.sweep.folder, None)  # as a worker does
    call = multirun.prepare_sweep(["--multirun", *texts], texts, jobs)
    assert [job.number for job in call.todo] == [1]
    assert [(outcome["number"], outcome["before"]) for outcome in call.ended] == [(0, True)]
    (samples,) = tmp_path.glob("results/runs/*/samples.jsonl")
    monkeypatch.setattr("kvbench.cli.report_runs.codes.older", lambda *_: {"samples": 1, "parts": ["method"]})
    assert len(multirun.prepare_sweep(["--multirun", *texts], texts, jobs).todo) == 2, "the code has changed"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    samples.parent.joinpath("metrics.json").unlink()
    assert len(multirun.prepare_sweep(["--multirun", *texts], texts, jobs).todo) == 2, "the run is gone"
    unit.forget()


def test_tables_fit_100_columns_and_name_settings_by_what_varies(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*GRID[:2], "method.residual=32,64,96,128,160,192,224,256", *GRID[3:]]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    table = (only(tmp_path).folder / "table.md").read_text().splitlines()
    assert {line.split("|")[1].strip() for line in table[2:]} == {f"kivi int2 residual={32 * n}" for n in range(1, 9)}


def test_records_hold_what_the_reader_needs(runs: Any, tmp_path: Path) -> None:
    assert main(GRID) == 0
    record = json.loads(sweeps.job_file(only(tmp_path).folder, 0).read_text())
    assert record["sweep"] == only(tmp_path).manifest.token
    assert record["overrides"] == list(only(tmp_path).manifest.jobs[0].overrides)


def test_a_sweep_that_repeats_its_samples_begins_anew_once_it_is_whole(runs: Any, tmp_path: Path) -> None:
    def stop(residual: int) -> None:
        raise KeyboardInterrupt

    grid, tokens = [*GRID, "runtime.rerun=times"], []
    runs.before.append(lambda residual: tokens.append(os.environ[sweeps.TOKEN]))
    runs.before.append(lambda residual: stop(residual) if len(tokens) == 2 else None)
    assert main(grid) == multirun.INTERRUPTED
    assert main(grid) == 0
    assert len(tokens) == 5 and len(set(tokens)) == 1, (
        "the cut-off sweep goes on: its runs know what they have repeated"
    )
    assert main(grid) == 0
    assert len(set(tokens)) == 2 and len(list((tmp_path / "results" / "sweeps").iterdir())) == 2
    assert sweeps.TOKEN not in os.environ
