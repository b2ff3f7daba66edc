"""`python -m kvbench.publish`: runs and sweeps that are on disk, read back from W&B's offline files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from experiments.page.made import row, run_id, write_made_run
from kvbench.loggers.wandb_service import Service
from kvbench.page.server import html
from kvbench.publish import sweeps
from kvbench.publish.command import main
from kvbench.results.samples import encode_row
from kvbench.results.sweeps import Sweep
from tests.loggers.wandb_file import read
from tests.publish.sweep_support import put, write_sweep

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sent(monkeypatch):
    """Record how W&B is started and what it is sent, without W&B."""

    class Run:
        step = 0

        def __init__(self, name):
            self.name, self.logged, self.summary, self.dir = name, [], {}, f"/nowhere/{name}/files"

        def log(self, values, step=None):
            self.logged.append(values)

        def finish(self, exit_code):
            self.exit_code = exit_code

    runs = []

    def start(self, run_id, **named):
        run = Run(run_id)
        run.named = named
        runs.append(run)
        return run

    monkeypatch.setattr(Service, "start", start)
    monkeypatch.setattr("kvbench.loggers.wandb.log_files", lambda *_: None)
    monkeypatch.setattr("kvbench.loggers.wandb.log_files", lambda *_: None)
    return runs


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes seconds."""
    monkeypatch.setattr("kvbench.publish.sweeps.installed", lambda module: False)


def wandb_files(folder):
    return {content["run_id"]: content for content in map(read, folder.rglob("*.wandb"))}


def test_a_run_and_its_sweep_are_in_wandbs_files_whole(tmp_path, no_pictures, capsys):
    results = tmp_path / "results"
    rows = [row(i, float(i % 2), "text") for i in range(3)]
    stores = [write_made_run(results / "runs", 0, "fp16", rows=rows), write_made_run(results / "runs", 1, rows=rows)]
    write_sweep(results, stores)
    assert main(["--sweep", "tod", "--dir", "w"]) == 0
    printed = capsys.readouterr()
    assert "no API key is configured, so it runs offline" in printed.err and printed.err.count("API key") == 1
    assert "pictures need kvbench[plot]" in printed.err
    assert "3 sent" in printed.out and "wandb sync w/wandb/offline-run-*" in printed.out
    computed = wandb_files(tmp_path / "w")
    run = computed[run_id(1)]
    assert (run["run_group"], run["job_type"], run["exit_code"]) == ("sweep today", "kivi", 0)
    assert {"kivi", "int2", "tiny", "mini", "sweep today"} == set(run["tags"])
    assert run["config"]["method"]["residual"] == 128
    history = [step for step in run["history"] if "sample/kv_MiB" in step]
    assert len(history) == 3 and history[1]["sample/tpot_ms"] == 25 and history[1]["sample/ttft_ms"] == 600
    assert run["summary"]["tpot_ms/median"] == 25 and run["summary"]["scores/key_value@2048/score"] == pytest.approx(
        1 / 3
    )
    files = run["artifacts"][f"run-{run_id(1)}"]
    assert {name: path.read_bytes() for name, path in files.items()} == {
        name: (stores[1].path / name).read_bytes() for name in ("metrics.json", "config.yaml", "samples.jsonl")
    }
    (samples,) = (tmp_path / "w").rglob(f"*{run_id(1)}/files/media/table/samples*.json")
    assert [line[0] for line in json.loads(samples.read_text())["data"]] == [entry["id"] for entry in rows]

    (name,) = set(computed) - {run_id(0), run_id(1)}
    sweep = computed[name]
    assert (sweep["display_name"], sweep["run_group"], sweep["job_type"]) == ("sweep today", "sweep today", "sweep")
    assert sweep["summary"] | {"jobs/done": 2, "jobs/failed": 1, "jobs/missing": 1} == sweep["summary"]
    assert sweep["config"]["command"].startswith("python -m kvbench --multirun")
    folder = next((tmp_path / "w").glob(f"wandb/*{name}/files/media"))
    (lines,) = folder.glob("table/runs*.json")
    content = json.loads(lines.read_text())
    assert content["columns"] == list(sweeps.COLUMNS)
    states = [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
    assert [line["state"] for line in states] == ["done", "done", "failed", "missing"]
    assert states[1]["command"] == "python -m kvbench method=kivi method.residual=64"
    (page,) = folder.glob("html/report*.html")
    assert html({})[:40] == page.read_text()[:40] and run_id(1) in page.read_text()
    assert len(list(folder.glob("table/pareto*.json"))) == 1
    assert {"manifest.json", "job-0000.json"} <= set(sweep["artifacts"][name])

    assert main(["--sweep", "today", "--dir", "w"]) == 0
    assert "3 already sent" in capsys.readouterr().out
    assert set(wandb_files(tmp_path / "w")) == set(computed) and len(list((tmp_path / "w").rglob("*.wandb"))) == 3


def test_what_has_changed_is_sent_again(tmp_path, sent):
    store = write_made_run(tmp_path / "results" / "runs", 1)
    assert [main([run_id(1)]), len(sent)] == [0, 1]
    assert [main([run_id(1)]), len(sent)] == [0, 1]
    assert [main([run_id(1), "--again"]), len(sent)] == [0, 2]
    store.write_metrics({**store.metrics(), "tokens_per_s": 99.0})
    assert [main([run_id(1)]), len(sent)] == [0, 3]
    assert [main([run_id(1), "--dir", "elsewhere"]), len(sent)] == [0, 4]
    assert sent[-1].summary["tokens_per_s"] == 99.0


def test_a_label_is_printed_with_control_characters_escaped(tmp_path, sent, capsys):
    store = write_made_run(tmp_path / "results" / "runs", 1)
    store.write_metrics({**store.metrics(), "label": "red \x1b[31m\nline"})
    for _ in range(2):  # sent, then known
        assert main([run_id(1)]) == 0
        assert r"red \x1b[31m\nline" in capsys.readouterr().out


def test_each_project_and_entity_and_what_is_asked_for_is_sent_once(tmp_path, sent):
    write_made_run(tmp_path / "results" / "runs", 1)
    for number, options in enumerate(
        (
            [],
            ["--project", "b"],
            ["--entity", "e"],
            ["--project", "b", "--entity", "e"],
            ["--tag", "t"],
            ["--group", "g"],
            ["--prompts"],
        ),
        start=1,
    ):
        for _ in range(2):
            assert main([run_id(1), "--mode", "offline", *options]) == 0
            assert len(sent) == number, options
    assert main([run_id(1), "--mode", "offline"]) == 0 and len(sent) == 7


def test_what_an_offline_folder_has_lost_is_written_again(tmp_path, no_pictures, capsys):
    results = tmp_path / "results"
    write_sweep(results, [write_made_run(results / "runs", 1)])
    for counts in ("2 sent", "2 already sent"):
        assert main(["--sweep", "today", "--mode", "offline", "--dir", "w"]) == 0
        assert f"/w /kvbench: {counts}\n" in capsys.readouterr().out
    (of_run,) = (tmp_path / "w" / "wandb").glob(f"offline-run-*-{run_id(1)}")
    shutil.rmtree(of_run)
    assert main(["--sweep", "today", "--mode", "offline", "--dir", "w"]) == 0
    assert "1 sent, 1 already sent" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "w")
    assert main(["--sweep", "today", "--mode", "offline", "--dir", "w"]) == 0
    assert "2 sent" in capsys.readouterr().out and run_id(1) in wandb_files(tmp_path / "w")


def test_samples_that_no_figure_includes_are_not_sent(tmp_path, sent):
    store = write_made_run(tmp_path / "results" / "runs", 1)
    metrics = store.metrics()
    store.write_metrics({**metrics, "samples": {**metrics["samples"], "left_out": ["key_value@2048/1"]}})
    assert main([run_id(1)]) == 0
    assert sum("sample/kv_MiB" in values for values in sent[0].logged) == 2


def test_damaged_and_unfinished_runs_are_named_and_the_others_are_sent(tmp_path, sent, capsys):
    runs = tmp_path / "results" / "runs"
    stores = [write_made_run(runs, number, unfinished=number == 3) for number in range(5)]
    (stores[1].path / "metrics.json").write_text('{"status": "ok"}')
    (stores[2].path / "config.yaml").write_text(": :")
    stores[4].samples_path.write_bytes(encode_row(row(0, 1.0)) + b'{"id": "torn')
    assert main([run_id(number) for number in range(5)]) == 1
    printed = capsys.readouterr()
    assert [run.name for run in sent] == [run_id(0), run_id(4)]
    assert f"{run_id(1)}/metrics.json: run_id is missing" in printed.err and "run the same command again" in printed.err
    assert f"{run_id(2)}/config.yaml: cannot be read" in printed.err
    assert f"run {run_id(3)} has not finished: it has 3 samples so far" in printed.err
    assert "1 damaged lines of samples.jsonl left out" in printed.out and "2 sent, 3 not sent" in printed.out


def test_a_run_that_is_being_worked_on_waits(tmp_path, sent, capsys):
    store = write_made_run(tmp_path / "results" / "runs", 1)
    with store.hold():
        assert main([run_id(1)]) == 1
    assert f"is still working on run {run_id(1)}" in capsys.readouterr().err and not sent


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["name the runs to send", "--sweep ID"]),
        (["nothing"], ["there is no run nothing"]),
        (["0000000000"], ["matches 2 runs"]),
        ([""], ["the name of a run is empty", "kvbench.report"]),
        (["nothing", "--results", "none"], ["there are no runs in none"]),
        (["--sweep", "mine"], ["there is no sweep mine"]),
        (["--sweep", "damaged"], ["is not the manifest of a sweep"]),
        ([run_id(1), "--mode", "online"], ["needs an API key", "wandb login"]),
        ([run_id(1), "--project", ""], ["logger.project"]),
    ],
)
def test_what_cannot_be_is_named_with_its_remedy(tmp_path, sent, capsys, arguments, messages):
    for number in (1, 2):
        write_made_run(tmp_path / "results" / "runs", number)
    (tmp_path / "results" / "sweeps" / "damaged").mkdir(parents=True)
    (tmp_path / "results" / "sweeps" / "damaged" / "manifest.json").write_text("{")
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert "hint:" in error and all(message in error for message in messages) and not sent


def test_without_wandb_the_package_is_named(tmp_path, monkeypatch, capsys):
    write_made_run(tmp_path / "results" / "runs", 1)
    monkeypatch.setattr("kvbench.publish.command.installed", lambda module: False)
    assert main([run_id(1)]) == 1
    assert "run pip install wandb" in capsys.readouterr().err


def test_wandb_that_is_switched_off_is_said(tmp_path, monkeypatch, capsys):
    write_made_run(tmp_path / "results" / "runs", 1)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main([run_id(1)]) == 1
    assert "WANDB_MODE=disabled" in capsys.readouterr().err


def test_a_service_that_fails_loses_nothing_and_is_asked_once(tmp_path, monkeypatch, capsys):
    import wandb

    for number in (1, 2):
        write_made_run(tmp_path / "results" / "runs", number)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    tried = []

    def init(self, module, mode, fixed):
        tried.append(mode)
        raise wandb.errors.CommError("no route to the host.\nmore")

    monkeypatch.setattr(Service, "_init", init)
    assert main([run_id(1), run_id(2), "--mode", "online"]) == 1
    error = capsys.readouterr().err
    assert tried == ["online"]
    assert f"{run_id(1)} could not be sent (CommError: no route to the host)" in error and "--mode offline" in error
    assert error.count("could not be sent") == 2
    assert not list((tmp_path / "results" / "runs").rglob(".delivered.json"))


def test_jobs_whose_runs_are_elsewhere_are_named(tmp_path, sent, no_pictures, capsys):
    results = tmp_path / "results"
    stores = [write_made_run(results / "runs", number) for number in (1, 2)]
    write_sweep(results, stores)
    os.rename(stores[1].path, tmp_path / "elsewhere")
    assert main(["--sweep", "today"]) == 1
    assert f"run {run_id(2)} of the sweep is not in" in capsys.readouterr().err
    assert len(sent) == 2 and sent[0].name == run_id(1)


def test_a_sweep_that_has_gone_on_is_sent_again(tmp_path, sent, no_pictures):
    results = tmp_path / "results"
    folder = write_sweep(results, [write_made_run(results / "runs", 1)])
    other = write_made_run(results / "runs", 2)
    for expected in (2, 2):
        assert main(["--sweep", "today"]) == 0
        assert len(sent) == expected
    put(folder, 2, metrics=other.metrics())
    assert main(["--sweep", "today"]) == 0
    assert [run.named["kind"] for run in sent] == ["kivi", "sweep", "kivi", "sweep"]
    assert sent[1].name == sent[3].name and sent[3].summary["jobs/done"] == 2


def test_the_front_is_among_runs_of_the_same_samples(tmp_path):
    results = tmp_path / "results"
    sizes = {1: (1000, 0.5), 2: (2000, 1.0), 3: (3000, 0.9)}
    stores = []
    for number, (size, score) in sizes.items():
        entry = row(0, score)
        entry["kv_bytes"]["used"] = {"total": size, "codes": size, "scales": 0, "window": 0, "index": 0}
        stores.append(write_made_run(results / "runs", number, rows=[entry], setting=0))
    stores.append(write_made_run(results / "runs", 9, rows=[row(0, 0.1)], setting=1))
    sweep = Sweep.open(write_sweep(results, stores))
    lines = sweeps.sweep_job_lines(sweep.progress())
    assert [line["on the Pareto front"] for line in lines] == [True, True, False, True, None, None]
    assert lines[0]["KV MiB"] == pytest.approx(1000 / 2**20)


def test_the_command_needs_no_torch():
    heavy = "{'torch', 'wandb', 'transformers', 'hydra'}"
    code = f"import sys, kvbench.publish.command; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_plots_of_a_sweep_are_pictures_too(tmp_path):
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    write_sweep(results, [write_made_run(results / "runs", 0, "fp16"), write_made_run(results / "runs", 1)])
    assert main(["--sweep", "today", "--dir", "w"]) == 0
    pictures = {path.name.partition("_")[0] for path in (tmp_path / "w").rglob("media/images/plots/*.png")}
    assert {"score-bytes", "score-tpot", "bytes"} <= pictures
