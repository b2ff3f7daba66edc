"""The figures of runs as the page holds them, whole: what each number is, and what stays out.

A sweep on the page: all its jobs, with their states, whether they have a run or not.
"""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest

from experiments.page.made import made_point, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.cli.report_page import reader
from kvbench.page import numbers, settings
from kvbench.page.data import FollowedSweep, Report
from kvbench.results import sweeps
from kvbench.results.store import find_runs
from kvbench.results.sweeps import Sweep
from tests.page.report_support import data_of
from tests.publish.sweep_support import TOKEN, put, write_sweep


@pytest.fixture
def page(tmp_path):
    """Function that returns the data of the page of the runs in `tmp_path`."""

    def build():
        assert report.main(["--results", str(tmp_path / "runs"), "--html", str(tmp_path / "r.html")]) == 0
        return data_of((tmp_path / "r.html").read_text(encoding="utf-8"))

    return build


def test_the_figures_of_a_run(page, tmp_path):
    write_made_run(tmp_path / "runs", 1, "fp16")
    write_made_run(tmp_path / "runs", 2, label="kivi int2", rows=[row(n, 1.0 if n else 0.5) for n in range(3)])
    data = page()
    fp16, kivi = data["runs"]
    assert kivi == {
        "id": run_id(2),
        "label": "kivi int2",
        "name": "kivi int2",
        "model": "tiny",
        "data": "mini",
        "status": "older",
        "older": "unknown code",
        "done": 3,
        "asked": 3,
        "command": "python -m kvbench model=tiny method=kivi dataset=mini dataset.limit=4",
        "device": "a processor",
        "score": kivi["score"],
        "tasks": [[0, *kivi["tasks"][0][1:]]],
        "kv": 1000,
        "bill": [600, 200, 200, 0, 0],
        "reserved": 1000,
        "ratio": 4,
        "peak": [5000, 3000],
        "ttft": 0.65,  # without the warm-up
        "tpot": 0.025,
        "p99": 0.03,
        "rate": 30,
        "ttfts": [0.605, 0.625, 0.65, 0.675, 0.695, 2],
        "tpots": [0.02, 0.02, 0.025, 0.03, 0.03, 4],
    }
    assert kivi["score"][0] == 0.83333 and kivi["score"][2:4] == [3, -0.16667]
    assert kivi["tasks"][0][1] == 0.8333 and kivi["tasks"][0][3:5] == [3, -0.1667]
    assert fp16["fp16"] is True and data["tasks"] == ["key_value@2048"]
    assert data["groups"] == {run_id(1).split("-")[0]: "tiny, mini (key_value at 2048)"}
    assert data["env"] == [{"key": "device_name", "values": ["a processor"], "of": [0, 0]}]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", data["made"])
    assert data["folder"] == str(tmp_path / "runs") and (data["sweep"], data["pairs"], data["skipped"]) == (
        None,
        [],
        [],
    )


def test_points_of_time_and_memory_are_a_table(page, tmp_path):
    """Prompt, batch, status; seconds to the first token and per token with 10 % and 90 %; tokens a second, bytes."""
    rows = [made_point(4096, 1, 0.5, 100), made_point(16384, 2, 0.75, 200), made_point(32768, 2, 1, 1, fits=False)]
    write_made_run(tmp_path / "runs", 4, rows=rows, groups={"dataset": {"name": "efficiency"}})
    (run,) = page()["runs"]
    assert run["points"] == [
        [4096, 1, "ok", 0.4096, 0.5, 0.45, 0.6, 2, 100, 600],
        [16384, 2, "ok", 3.2768, 0.75, 0.675, 0.9, 2.6667, 200, 2400],
        [32768, 2, "oom"],
    ]
    assert "score" not in run and "tpot" not in run and run["data"] == "efficiency"


def test_a_page_holds_the_first_32_points_of_a_run(page, tmp_path):
    write_made_run(tmp_path / "runs", 4, rows=[made_point(1024 * (n + 1), 1, 0.5, 100) for n in range(34)])
    assert len(page()["runs"][0]["points"]) == 32


def test_settings_that_differ_are_columns(page, tmp_path):
    """Of the runs that chose the same method; those of most runs first."""
    for number, residual in enumerate((64, 128, 128)):
        write_made_run(tmp_path / "runs", number, groups={"method": {"residual": residual, "sinks": number % 2}})
    write_made_run(tmp_path / "runs", 3, "atom")
    columns = {column["key"]: column for column in page()["settings"]}
    assert set(columns) == {"method.residual", "method.sinks"}
    assert columns["method.residual"]["values"] == [64, 128] and len(columns["method.residual"]["of"]) == 4


def test_choices_of_a_run_have_names_even_if_its_record_lacks_them():
    known = {"label": "kivi int2 residual=64", "config": {"model": "tiny", "quantizer": "int2", "dataset": "mini"}}
    shown = settings.choices(SimpleNamespace(metrics=known))
    assert shown == {"model": "tiny", "method": "kivi", "quantizer": "int2", "dataset": "mini"}
    shown = settings.choices(SimpleNamespace(metrics={"label": "fp16", "config": {}}))
    assert shown == {"model": "?", "method": "fp16", "quantizer": "none", "dataset": "?"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (True, True),
        (2**53 - 1, 2**53 - 1),
        (2**53, "9007199254740992"),
        (-(2**53), "-9007199254740992"),
        (0.5, 0.5),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        ("text", "text"),
        ([1, "é"], '[1,"é"]'),
        ({"a": {"b": 1}}, '{"a":{"b":1}}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ([object], "[\"<class 'object'>\"]"),
        ("x" * 160, "x" * 160),
        ("x" * 161, "x" * 77 + " ... " + "x" * 77),
        (["y" * 200], '["' + "y" * 75 + " ... " + "y" * 75 + '"]'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_of_settings_are_json_or_texts(value, shown):
    assert numbers.json_value(value) == shown


def test_numbers_are_short_and_texts_whole_or_cut():
    shorts = [
        numbers.short_number(value) for value in (True, "1", None, 7, 10**20, 1.0, 0.123456, 1e15, 1e14, float("nan"))
    ]
    assert shorts == [None, None, None, 7, 10**20, 1, 0.12346, 1e15, 10**14, None]
    assert isinstance(numbers.short_number(1e14), int) and isinstance(numbers.short_number(1e15), float)
    assert numbers.short_number(0.123456, 2) == 0.12
    assert (numbers.whole_or_empty("abc", 3), numbers.whole_or_empty("abcd", 3)) == ("abc", "")
    assert numbers.shorten_middle("a" * 600) == "a" * 600 and len(numbers.shorten_middle("a" * 601)) == 599
    assert numbers.trimmed([None, 1, None, None]) == [None, 1] and numbers.trimmed([None]) == []
    assert json.loads(numbers.encoded({"a": "</script>&\ud83d"})) == {"a": "</script>&\ud83d"}
    assert not set("<>&") & set(numbers.encoded("<>&\ud83d")) and numbers.encoded([1, 2]) == "[1,2]"
    with pytest.raises(ValueError, match="not JSON compliant"):
        numbers.encoded(float("nan"))


def test_the_times_of_an_unfinished_run_are_those_of_the_device_with_most_samples(page, tmp_path):
    rows = [row(n, 1.0) for n in range(5)]
    for entry in rows[:2]:
        entry["measured"] |= {"device": "another", "step_s": [0.5] * 4}
    write_made_run(tmp_path / "runs", 1, rows=rows, unfinished=True)
    (run,) = page()["runs"]
    assert (run["device"], run["done"], run["tpot"]) == ("a processor", 5, 0.025)


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def built(results, *arguments):
    file = results / "report.html"
    assert report.main(["--html", str(file), *arguments]) == 0
    return data_of(file.read_text())


def test_all_jobs_are_shown_with_their_states(results, capsys, monkeypatch):
    stores = [write_made_run(results / "runs", number) for number in (1, 2)]
    write_made_run(results / "runs", 5)  # of another sweep
    folder = write_sweep(results, stores)
    going = write_made_run(results / "runs", 3, unfinished=True)
    sweeps.running_file(folder, 3).write_text(json.dumps({**sweeps.here(), "sweep": TOKEN, "run_id": going.run_id}))
    monkeypatch.chdir(results.parent)
    data = built(results, "--sweep", "tod")
    assert {run["id"] for run in data["runs"]} == {run_id(1), run_id(2), run_id(3)}
    shown = data["sweep"]
    assert shown["command"] == "python -m kvbench --multirun method=kivi method.residual=32,64"
    assert data["runs"][0]["command"].startswith("python -m kvbench model=tiny")
    assert [job[2] for job in shown["jobs"]] == ["done", "done", "failed", "running"]
    command = "python -m kvbench method=kivi method.residual=32"
    assert shown["jobs"][0] == [1, "setting 0", "done", run_id(1), "ok", command]
    assert shown["jobs"][2][3:5] == [None, "error"] and shown["jobs"][2][6] == "ValueError: a bad value"
    assert shown["jobs"][3][3] == going.run_id and shown["driven"] is False


def test_a_sweep_without_a_run_is_shown(results, capsys):
    write_sweep(results, [])
    data = built(results, "--results", str(results / "runs"), "--sweep", "today")
    assert data["runs"] == [] and [job[2] for job in data["sweep"]["jobs"]] == ["failed", "missing"]
    assert report.main(["--results", str(results / "runs"), "--figures", "x", "--sweep", "today"]) == 1
    assert "no finished job of the sweep today has a run" in capsys.readouterr().err


def test_a_damaged_manifest_is_named(results, capsys):
    folder = write_sweep(results, [])
    (folder / sweeps.MANIFEST).write_text("{")
    assert report.main(["--results", str(results / "runs"), "--html", "x.html", "--sweep", "today"]) == 1
    assert "is not the manifest of a sweep" in capsys.readouterr().err


def test_the_page_follows_the_jobs(results):
    folder = write_sweep(results, [write_made_run(results / "runs", 1)])
    followed = FollowedSweep(Sweep.open(folder))
    shown = Report(lambda: find_runs(results / "runs"), reader(), results / "runs", results, sweep=followed)
    before = shown.signature()
    assert shown.signature() == before
    job = {**sweeps.here(), "sweep": TOKEN, "run_id": run_id(2)}
    sweeps.running_file(folder, 2).write_text(json.dumps(job))
    during = shown.signature()
    assert during != before and followed.run_ids() == {run_id(1), run_id(2)}
    assert shown.data()["sweep"]["jobs"][2][2] == "running"
    os.unlink(sweeps.running_file(folder, 2))
    put(folder, 2, metrics=write_made_run(results / "runs", 2, rows=[row(0, 1.0)]).metrics())
    assert shown.signature() != during
    data = shown.data()
    assert data["sweep"]["jobs"][2][2] == "done" and len(data["runs"]) == 2


def test_messages_are_shortened_and_commands_are_whole_or_left_out(results):
    folder = write_sweep(results, [], command=("x=[1,2]", "y" * 10_000))
    put(folder, 0, status="error", message=f"{'y' * 10_000}\nmore")
    data = FollowedSweep(Sweep.open(folder)).data()
    assert data["command"].startswith("python -m kvbench 'x=[1,2]' yyy") and len(data["command"]) > 10_000
    assert len(data["jobs"][0][6]) <= 200
    longer = write_sweep(results, [], "longer", command=("x" * 30_000,))
    assert FollowedSweep(Sweep.open(longer)).data()["command"] == ""


def test_texts_of_a_sweep_have_their_lengths(results):
    name = "n" * 121
    job = sweeps.Job(number=0, overrides=("x" * 1182,), label="l" * 161)
    longer = sweeps.Job(number=1, overrides=("x" * 1183,), label="l" * 160)
    more = {"id": name, "created": "c" * 41, "launcher": "k" * 41, "jobs": (job, longer)}
    data = FollowedSweep(Sweep.open(write_sweep(results, [], **more))).data()
    half = {"id": 57, "created": 17, "launcher": 17}  # of a text that is cut, before and after the dots
    assert {key: data[key] for key in half} == {
        key: f"{more[key][0] * n} ... {more[key][0] * n}" for key, n in half.items()
    }
    shown = {entry[0]: entry for entry in data["jobs"]}
    assert shown[1][1] == "l" * 77 + " ... " + "l" * 77 and shown[2][1] == "l" * 160
    assert len(shown[1][5]) == 1200 and len(shown[2]) == 3, "a longer command is left out"
    exact = {**more, "id": "n" * 120, "created": "c" * 40, "launcher": "k" * 40}
    data = FollowedSweep(Sweep.open(write_sweep(results, [], "exact", **exact))).data()
    assert {key: data[key] for key in half} == {key: exact[key] for key in half}


def test_a_pair_of_which_one_run_is_gone_is_left_out(results):
    stores = [write_made_run(results / "runs", number) for number in (1, 2)]
    pairs = [(run_id(1), run_id(2)), (run_id(1), run_id(9)), (run_id(9), run_id(2))]
    shown = Report(lambda: stores, reader(), results / "runs", results, pairs=pairs)
    assert [pair["runs"] for pair in shown.data()["pairs"]] == [[run_id(1), run_id(2)]]
