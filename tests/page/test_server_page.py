"""The built page without a browser: its data, its size, and texts that must be harmless in it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments.page.made import config, metrics, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.metrics import fidelity
from kvbench.page import server
from kvbench.page.numbers import encoded, json_value, short_number, shorten_middle
from kvbench.results.columns import UNFINISHED
from tests.page.report_support import data_of
from tests.results.test_fidelity_fold import row as fidelity_row

NASTY = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'`${alert(1)}\\",
    "<img src=x onerror=alert(1)>",
    "half an emoji \ud83d",
    "line\u2028separator\u0000null",
    "{{data}} {{script}}",
    "&lt;b&gt;",
    "\x1b]0;title\x07\x1b[31m\u202egnp.exe\n\tnext line",
)


@pytest.fixture
def built(tmp_path, capsys):
    """Function that writes the page of the runs in `tmp_path` and returns its text, its data and what was printed."""

    def build(*arguments):
        file = tmp_path / "out" / "report.html"
        assert report.main(["--results", str(tmp_path / "runs"), "--html", str(file), *arguments]) == 0
        text = file.read_text(encoding="utf-8")
        return text, data_of(text), capsys.readouterr()

    return build


class Elements(HTMLParser):
    """The elements of a page and the addresses that it names."""

    def __init__(self, text):
        super().__init__()
        self.names, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.addresses += [value for key, value in attributes if key in ("src", "href", "action", "srcset")]


def test_a_run_is_shown_with_its_figures(built, tmp_path):
    write_made_run(tmp_path / "runs", 1, "fp16")
    write_made_run(tmp_path / "runs", 2, groups={"method": {"residual": 64}})
    text, data, printed = built()
    assert "2 runs" in printed.out
    fp16, kivi = sorted(data["runs"], key=lambda run: run["id"])
    assert fp16["fp16"] is True and fp16["name"] == "fp16"
    assert kivi["score"] == [0.83333, 0.71711, 3, -0.16667, 0.71711, 0.11622, 1]  # with its interval
    assert (kivi["kv"], kivi["bill"], kivi["ratio"]) == (1000, [600, 200, 200, 0, 0], 4)
    assert kivi["ttfts"] == [0.605, 0.625, 0.65, 0.675, 0.695, 2]  # without the warm-up sample
    assert kivi["tpots"][2:] == [0.025, 0.03, 0.03, 4]
    assert kivi["command"] == (
        "python -m kvbench model=tiny method=kivi method.residual=64 dataset=mini dataset.limit=4"
    )
    assert data["groups"] == {run_id(0).split("-")[0]: "tiny, mini (key_value at 2048)"}
    assert len(text.encode()) < 300_000 + 2 * 2_000


def compared(spread=None):
    """Rows of three texts with divergences `spread` times 0 to 21, or those of the tests of fidelity."""
    rows = [{**row(i, 0.0, task="text"), "scores": {}, "fidelity": fidelity_row(i)["fidelity"]} for i in range(3)]
    for i, entry in enumerate(rows if spread is not None else ()):
        entry["fidelity"]["kld"] = [spread * (k + i) for k in range(20)]
    return rows


def test_a_run_is_shown_with_its_fidelity_to_fp16(built, tmp_path):
    write_made_run(tmp_path / "runs", 1, rows=compared())
    write_made_run(tmp_path / "runs", 2)
    text, data, _ = built()
    kivi, other = sorted(data["runs"], key=lambda run: run["id"])
    # divergences 1 to 20, 2 to 21 and 3 to 22; two of 20 tokens have another first choice
    mean, tail, share, median, low, high, *of_share = kivi["kl"]
    assert (mean, share, median, of_share) == (11.5, 0.9, 11.5, [0.9, 0.9]) and 21 < tail < 22
    assert low < mean < high
    assert kivi["tasks"][0][8:] == [11.5, pytest.approx(tail, rel=1e-3)] and "kl" not in other
    assert "KL divergence from fp16" in text


def test_flips_are_counted_against_the_fp16_run(built, tmp_path):
    draw = random.Random(0)
    right = {number: [float(draw.random() < share) for _ in range(50)] for number, share in ((1, 0.9), (2, 0.6))}
    shown = {number: [row(i, score) for i, score in enumerate(scores)] for number, scores in right.items()}
    write_made_run(tmp_path / "runs", 1, "fp16", rows=shown[1])
    write_made_run(
        tmp_path / "runs", 2, rows=[{**shown[2][0], "id": "key_value@2048/99"}, *shown[2][1:]], baseline=run_id(1)
    )
    write_made_run(tmp_path / "runs", 3, rows=shown[2], baseline=run_id(9))  # of a run that is not in the report
    _, data, _ = built()
    found = {run["id"]: run.get("flips") for run in data["runs"]}
    expected = fidelity.flips(right[1][1:], right[2][1:])
    assert expected["lost"] > expected["won"] > 0  # the 50th sample has no partner
    lost, won, n, low, high = found.pop(run_id(2))
    assert found == {run_id(1): None, run_id(3): None} and (lost, won, n) == (expected["lost"], expected["won"], 49)
    assert low < expected["flips"] < high


def test_environments_are_shown_whatever_they_hold(built, tmp_path):
    machine = {"device_name": "a card", "dtype": "bfloat16", "cpu": "x" * 500, "triton": None}
    machine["load"] = {"cpus": 2, "average": [0.5, 1], "own_cpus": 1}
    for number in (1, 2):
        write_made_run(tmp_path / "runs", number, env=machine)
    write_made_run(tmp_path / "runs", 3, env={**machine, "dtype": "float32"})
    _, data, _ = built()
    order = sorted(range(3), key=lambda place: data["runs"][place]["id"])
    columns = {column["key"]: [column["values"][column["of"][i]] for i in order] for column in data["env"]}
    assert len(data["env"][0]["values"]) == 1  # what is equal is there once
    load = {"load.cpus": [2] * 3, "load.average": ["[0.5,1]"] * 3, "load.own_cpus": [1] * 3}
    assert columns == {
        "device_name": ["a card"] * 3, "dtype": ["bfloat16", "bfloat16", "float32"],
        "cpu": [shorten_middle("x" * 500, 100)] * 3,
        **load, "load.mhz": ["[]"] * 3,
    }  # fmt: skip


def test_without_a_name_the_page_lies_beside_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_made_run(Path("results/runs"), 1)
    write_made_run(Path("results/other"), 2)
    write_made_run(Path("old/runs"), 3)
    for folder, place in (("results/runs", "results"), ("results/other", "results/other"), ("old/runs/", "old")):
        assert report.main(["--results", folder, "--html"]) == 0
        assert f"{place}/report.html: 1 run" in capsys.readouterr().out
    ids = {
        place: data_of(Path(place, "report.html").read_text())["runs"][0]["id"]
        for place in ("results", "results/other", "old")
    }
    assert ids == {"results": run_id(1), "results/other": run_id(2), "old": run_id(3)}
    assert report.main(["--results", "results/other", "--html"]) == 0  # the page is not taken for a run
    assert "1 run" in capsys.readouterr().out


def test_nothing_is_loaded_and_only_the_own_script_may_run(built, tmp_path):
    write_made_run(tmp_path / "runs", 1)
    text, _, _ = built()
    elements = Elements(text)
    assert {address for address in elements.addresses if not address.startswith("#")} == {"data:,"}
    assert elements.names.count("script") == 2
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy


def test_the_script_sets_texts_only_as_text():
    names = {path.name for path in server._ASSETS.iterdir()}
    assert names == {"page.html", *server.STYLES, *server.SCRIPTS}
    for name in server.SCRIPTS:
        source = (server._ASSETS / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|</script", source
        )
        assert len(source.splitlines()) < 300


@pytest.mark.parametrize("nasty", NASTY, ids=range(len(NASTY)))
def test_texts_of_runs_are_harmless(built, tmp_path, nasty):
    folder = tmp_path / "runs"
    write_made_run(folder, 1, "fp16", rows=[row(0, 1.0, "fine")], error=nasty.replace("\x00", ""), status="interrupted")
    write_made_run(
        folder,
        2,
        rows=[row(0, 0.0, nasty)],
        label=nasty,
        groups={"method": {"note": nasty.encode("utf-8", "replace").decode()}},
    )
    text, data, _ = built("--pair", run_id(1), run_id(2))
    kivi = next(run for run in data["runs"] if run["id"] == run_id(2))
    assert kivi["label"] == nasty
    assert data["pairs"][0]["samples"] == [["key_value@2048/0", 1, 0, "fine", nasty]]
    elements = Elements(text)
    assert elements.names.count("script") == 2 and "img" not in elements.names and "b" not in elements.names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None, True, "text", []])
def test_what_is_no_number_is_left_out(value):
    assert short_number(value) is None
    encoded([short_number(value), json_value(value)])  # does not raise


@pytest.mark.parametrize(
    ("value", "expected"),
    [(float("inf"), "inf"), (float("nan"), "nan"), (None, None), (2**60, str(2**60)), ([1, 2], "[1,2]"), (0.5, 0.5)],
)
def test_settings_fit_into_json(value, expected):
    assert json_value(value) == expected


def test_settings_without_a_json_number_are_shown(built, tmp_path):
    for number, alpha in enumerate((float("nan"), float("inf"), None, 0.5)):
        write_made_run(tmp_path / "runs", number, groups={"method": {"alpha": alpha}})
    _, data, _ = built()
    (column,) = (column for column in data["settings"] if column["key"] == "method.alpha")
    assert {str(value) for value in column["values"]} == {"nan", "inf", "None", "0.5"}


def test_long_texts_are_shortened(built, tmp_path):
    assert len(shorten_middle("x" * 10_000, 100)) == 99 and shorten_middle("short") == "short"
    folder = tmp_path / "runs"
    write_made_run(folder, 1, "fp16", rows=[row(0, 1.0, "a" * 100_000)])
    write_made_run(folder, 2, rows=[row(0, 0.0, "b" * 100_000)], label="c" * 100_000)
    text, data, _ = built("--pair", run_id(1), run_id(2))
    assert len(text) < 300_000
    assert all(len(said) <= 4000 for said in data["pairs"][0]["samples"][0][3:])


def test_a_damaged_run_is_named_and_skipped(built, tmp_path):
    write_made_run(tmp_path / "runs", 1)
    damaged = write_made_run(tmp_path / "runs", 2)
    (damaged.path / "metrics.json").write_text('{"status": "ok"}')
    _, data, printed = built()
    assert [run["id"] for run in data["runs"]] == [run_id(1)]
    assert f"skipped: {damaged.path / 'metrics.json'}" in printed.err
    (problem,) = data["skipped"]
    assert problem.startswith(str(damaged.path))


def test_samples_that_cannot_be_read_are_named(built, tmp_path):
    store = write_made_run(tmp_path / "runs", 1)
    store.samples_path.unlink()
    store.samples_path.mkdir()
    _, data, printed = built()
    assert data["runs"][0]["score"][0] == 0.83333
    assert "cannot be read" in data["runs"][0]["problem"] and "cannot be read" in printed.err


def test_a_run_that_goes_on_has_the_figures_of_what_is_done(built, tmp_path):
    write_made_run(tmp_path / "runs", 1, unfinished=True)
    _, data, _ = built()
    (run,) = data["runs"]
    assert (run["status"], run["done"], run["score"][:3]) == (UNFINISHED, 3, [0.83333, 0.71711, 3])
    assert run["kv"] == 1000 and run["tpot"] == 0.025


def test_runs_are_named_by_the_settings_that_differ(built, tmp_path):
    for number, residual in enumerate((128, 64, 32)):
        write_made_run(tmp_path / "runs", number, groups={"method": {"residual": residual}})
    write_made_run(tmp_path / "runs", 3, "atom")
    _, data, _ = built()
    names = {run["id"]: run["name"] for run in data["runs"]}
    expected = ("kivi int2", "kivi int2 residual=64", "kivi int2 residual=32", "atom int2")
    assert tuple(names[run_id(number)] for number in range(4)) == expected
    columns = {column["key"]: column["values"] for column in data["settings"]}
    assert set(columns["method.residual"]) == {128, 64, 32}


def test_pairs_are_of_two_runs_that_exist(built, tmp_path, capsys):
    write_made_run(tmp_path / "runs", 1)
    write_made_run(tmp_path / "runs", 2)
    arguments = ["--results", str(tmp_path / "runs")]
    for pair, message in (
        (("nothing", run_id(1)), "there is no run nothing"),
        ((run_id(1), run_id(1)), "one run twice"),
    ):
        assert report.main([*arguments, "--html", str(tmp_path / "report.html"), "--pair", *pair]) != 0
        assert message in capsys.readouterr().err
    assert report.main([*arguments, "--pair", run_id(1), run_id(2)]) == 2
    assert "needs --html or --serve" in capsys.readouterr().err


def test_the_runs_of_a_sweep_alone(tmp_path, capsys):
    runs, sweeps = tmp_path / "results" / "runs", tmp_path / "results" / "sweeps"
    for number in range(3):
        write_made_run(runs, number)
    for name in ("2026-11-22_10-00-00", "2026-11-22_11-00-00"):
        (sweeps / name).mkdir(parents=True)
    for number, metrics_of in enumerate(({"run_id": run_id(1)}, None, {"run_id": [2]})):
        (sweeps / "2026-11-22_10-00-00" / f"job-{number:04}.json").write_text(json.dumps({"metrics": metrics_of}))
    (sweeps / "2026-11-22_10-00-00" / "job-0009.json").write_text("{")
    file = tmp_path / "report.html"
    arguments = ["--results", str(runs), "--html", str(file), "--sweep"]
    assert report.main([*arguments, "2026-11-22_10"]) == 0
    assert [run["id"] for run in data_of(file.read_text())["runs"]] == [run_id(1)]
    wrong = {"2026-11-22": "matches 2 sweeps", "mine": "there is no sweep mine", "2026-11-22_11": "no finished job"}
    for name, message in wrong.items():
        assert report.main([*arguments, name]) == 1
        assert message in capsys.readouterr().err
    assert report.main(["--results", str(runs), "--sweep", "2026-11-22_10"]) == 1
    assert "manifest.json: cannot be read" in capsys.readouterr().err


def test_at_most_200_samples_of_a_pair(built, tmp_path):
    folder = tmp_path / "runs"
    write_made_run(folder, 1, "fp16", rows=[row(index, 1.0) for index in range(250)])
    write_made_run(
        folder, 2, rows=[row(index, float(index < 20), "other" if index < 230 else "") for index in range(250)]
    )
    _, data, _ = built("--pair", run_id(1), run_id(2))
    (pair,) = data["pairs"]
    assert (len(pair["samples"]), pair["left_out"], pair["equal"]) == (200, 50, 0)
    assert all(a != b for _, a, b, _, _ in pair["samples"])  # those with other scores come first
    assert pair["tasks"] == [["key_value@2048", 1, 0.08, -0.92, 0.043075, 250]]


def test_a_page_that_cannot_be_written_is_said(tmp_path, capsys):
    write_made_run(tmp_path / "runs", 1)
    (tmp_path / "file").write_text("")
    assert report.main(["--results", str(tmp_path / "runs"), "--html", str(tmp_path / "file" / "report.html")]) == 2
    assert "--html" in capsys.readouterr().err
    assert report.main(["--results", str(tmp_path / "none"), "--html", str(tmp_path / "report.html")]) == 1
    assert "there are no runs" in capsys.readouterr().err


def test_many_runs_stay_within_two_kilobytes_each(tmp_path, built):
    tasks = [f"task_{i}" for i in range(60)]
    rows = [row(i, 0.123456 * (i % 7), task=task) for task in tasks for i in range(2)]
    entry = metrics(run_id(0), config(), rows)
    for number in range(5):
        store = write_made_run(tmp_path / "runs", number, rows=rows[:2])
        store.write_metrics({**entry, "run_id": store.run_id})
    text, data, _ = built()
    assert len(text.encode()) < 300_000 + 5 * 2_000
    assert all(len(encoded(run)) <= 2_400 and run["more_tasks"] == 20 for run in data["runs"])
