"""Details of a run below its table, and the lines of a sweep that is followed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.page.made import row, run_id, write_made_run
from kvbench.cli import report, report_runs
from kvbench.errors import KvbenchError
from kvbench.results import sweeps
from tests.publish.sweep_support import put, write_sweep


class Store(SimpleNamespace):
    """A stored run of some metrics and rows."""

    run_id, path = "a-b", "results/runs/a-b"

    def metrics(self) -> dict[str, Any] | None:
        return self.content

    def samples(self) -> Any:
        return SimpleNamespace(rows=self.rows, damaged=self.damaged)

    def config(self) -> dict[str, Any] | None:
        return self.settings


def store(*, rows: Any = None, damaged: Any = (), settings: Any = None, **changes: Any) -> Store:
    sizes = {"total": 2048, "codes": 1024}
    content = {
        "label": "kivi int2",
        "status": "ok",
        "env": {"kvbench": "1.0", "commit": "abc", "torch": "2.0", "transformers": "5.0"},
        "attention": {"path": "torch", "reads_packed": True},
        "kv_bytes": {"used": sizes, "reserved": sizes},
        "scores": {},
        "data": None,
        "error": None,
        **changes,
    }
    return Store(content=content, rows=rows or {}, damaged=damaged, settings=settings)


@pytest.fixture
def details(capsys: pytest.CaptureFixture[str]):
    """Function that returns the lines about a run."""

    def lines(one: Any) -> list[str]:
        report._details(one)
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_run_is_described_line_by_line(details) -> None:
    assert details(store()) == [
        "",
        "a-b  kivi int2  ok",
        "  directory   results/runs/a-b",
        "  attention   torch, reads packed codes",
        "  KV used     total 2 KiB  codes 1 KiB",
        "  KV reserved total 2 KiB  codes 1 KiB",
        "  made with   kvbench 1.0 (abc)",
        "              torch 2.0, transformers 5.0",
    ]
    plain = details(store(attention={"path": "x", "reads_packed": False}, env={}))
    assert "  attention   x, reads full precision" in plain and "  made with   kvbench None (no commit)" in plain
    unfinished = Store(content=None, rows={}, damaged=(), settings=None)
    assert details(unfinished) == ["", "a-b    unfinished"]


def test_likelihoods_are_shown_by_task(details) -> None:
    text = {"ppl": 5.5, "bits_per_byte": 0.75, "windows": 3, "mode": "decode"}
    nll = {"mean": 1.25, "vs_fp16": {"diff": 0.5}}
    scores = {
        "a": {"perplexity": text, "nll": nll},
        "b": {"perplexity": {**text, "bits_per_byte": None}},
        "c": {"nll": nll},
        "d": {"nll": {**nll, "vs_fp16": None}},
        "e": {"nll": None},
    }
    shown = [line.strip() for line in details(store(scores=scores)) if "perplexity" in line or "NLL" in line]
    assert shown == [
        "perplexity  a: 5.5000, 0.7500 bits per byte, 3 windows, mode decode",
        "perplexity  b: 5.5000, 3 windows, mode decode",
        "answer NLL  c: 1.2500 nats per token, +0.5000 compared with fp16",
        "answer NLL  d: 1.2500 nats per token",
    ]


def test_means_of_ruler_are_shown_for_ruler_alone(details, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.ruler, "lengths", lambda scores: SimpleNamespace(text=lambda: "mean 0.5"))
    for target, count in (("ruler", 1), ("mini", 0)):
        lines = details(store(data={"identity": {"target": target}}))
        assert lines.count("  RULER       mean 0.5") == count
    monkeypatch.setattr(report.ruler, "lengths", lambda scores: None)
    assert not any("RULER" in line for line in details(store(data={"identity": {"target": "ruler"}})))


def test_what_is_damaged_or_went_wrong_is_shown(details) -> None:
    lines = details(store(damaged=(3, 9), error="first\nsecond \x1b[31m"))
    assert sum(line.startswith("  damaged     2 lines of samples.jsonl") for line in lines) == 1
    place = lines.index("  error       first")
    assert lines[place + 1].startswith("second ") and "\x1b" not in "".join(lines)
    assert not any("damaged" in line or "error" in line for line in details(store()))


def test_samples_of_older_code_are_listed_by_what_changed(details, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most eight of them, with the number of the others."""
    changed = {**{f"s{n}": ["method", "cache"] for n in range(9)}, "t": ["method"], "new": []}
    monkeypatch.setattr(report.sources, "code", lambda config: "now")
    monkeypatch.setattr(report.codes, "of", lambda row: row)
    monkeypatch.setattr(report.codes, "changed", lambda row, now: changed[row] if now == "now" else None)
    lines = details(store(code={"v1": 10, "v2": 1}, rows={name: name for name in changed}, settings={"a": 1}))
    assert "  code        v1 (10 samples), v2 (1 samples)" in lines
    shown = ", ".join(f"s{n}" for n in range(8))
    assert [line for line in lines if "older code" in line] == [
        f"  older code  method, cache: {shown} and 1 more",
        "  older code  method: t",
    ]
    for one in (store(code={"v1": 1}), store(rows={"t": "t"}, settings={"a": 1})):
        assert not any("older code" in line for line in details(one))


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Any) -> int:
        raise BrokenPipeError

    read, written = os.pipe()
    monkeypatch.setattr(report, "_main", broken)
    with os.fdopen(written, "w") as pipe:
        monkeypatch.setattr(report.sys, "stdout", pipe)
        os.close(read)
        assert report.main([]) == 0
        print("into nothing", file=pipe, flush=True)  # raises if it still goes to the reader


def test_forms_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_made_run(tmp_path, 1, rows=[row(0, 1.0)])
    write_made_run(tmp_path, 2, rows=[row(0, 0.0)])
    shown = {}
    for form in ("screen", "markdown", "csv"):
        command = ["--results", str(tmp_path), "--compare", run_id(1), run_id(2), "--format", form]
        assert report.main(command) == 0
        shown[form] = capsys.readouterr().out
    assert "| " in shown["markdown"] and "," in shown["csv"].splitlines()[0] and len(set(shown.values())) == 3
    assert not any(text.endswith("\n\n") for text in shown.values())


def test_runs_that_cannot_be_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_made_run(tmp_path, 1).path / "metrics.json").write_text("{")
    assert report.main(["--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed.count("skipped: ") == 1 and "none of the runs can be read" in printed
    assert report.main(["--results", str(tmp_path), "--show", run_id(1)]) == 1
    with pytest.raises(KvbenchError, match="the name of a run is empty"):
        report_runs.find_run([], "")


def test_the_runs_of_a_sweep_are_where_its_command_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for named, asked, wanted in (
        ("mine", report_runs.RUNS, Path("mine")),
        ("none", report_runs.RUNS, report_runs.RUNS),
        ("mine", Path("asked"), Path("asked")),
    ):
        sweep: Any = SimpleNamespace(manifest=SimpleNamespace(results_dir=named))
        assert report_runs.runs_of(sweep, asked) == wanted
    assert report_runs.results_above(Path("/a/results/b/runs")) == Path("/a/results")
    assert report_runs.results_above(Path("/a/b/runs")) == Path("/a/b")


def test_a_sweep_with_many_failures_names_the_first_ones(tmp_path: Path) -> None:
    most = report.MOST
    jobs = tuple(sweeps.Job(number=n, overrides=(f"a={n}",), label=f"setting {n}") for n in range(most + 3))
    folder = write_sweep(tmp_path / "results", [], "my sweep", jobs=jobs)
    for number in range(most + 2):
        put(folder, number, status="error", message=f"error {number}\nmore")
    one = sweeps.Sweep.open(folder)
    last = f"to run what is missing: python -m kvbench --resume '{one.name}'"
    more = f"and 2 more; python -m kvbench.report --html --sweep '{one.name}' has all"
    jobs_shown = [f"job {n + 1} failed: setting {n}: error {n}" for n in range(most)]
    counts = f"sweep my sweep: {most + 3} jobs, {most + 2} failed, 1 not started"
    assert report._sweep_lines(one, one.progress(), False) == [counts, *jobs_shown, more, last]
    assert report._sweep_lines(one, one.progress(), True)[-1] == more, "who drives it goes on"
    assert report._sweep_lines(one, one.progress()[1:most], True)[-1] == jobs_shown[-1]
