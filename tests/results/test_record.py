"""One record: it writes its own schema, and reads every run that was ever written."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path

import jsonschema
import pytest

from kvbench.cli import report
from kvbench.results import columns, point_columns, record, tables, typed
from kvbench.results.columns import LIST, TABLE, Column
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from kvbench.util.table import Cell
from tests.run_files import on_disk, store_of
from tests.run_support import config

#: real runs, written by the code of their time: 1a to 1h are the states of version 1 in the order of the history, and
#: 2-points is of version 2
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
OLDER = [json.loads(path.read_text(encoding="utf-8")) for path in FIXTURES]
NAMES = [path.stem for path in FIXTURES]


def test_the_schema_is_the_one_that_the_record_writes():
    assert record.SCHEMA.read_text(encoding="utf-8") == record.schema_text(), "python -m kvbench.results.record"
    jsonschema.Draft202012Validator.check_schema(record.metrics_schema())


def test_a_run_is_what_the_schema_says_and_reading_loses_nothing(tmp_path):
    for name in ("fp16", "kivi"):
        metrics = on_disk(answer_run(config(tmp_path, name, dataset={"limit": 2})))
        assert metrics["schema_version"] == record.SCHEMA_VERSION
        assert typed.plain_tree(record.read_metrics(metrics)) == metrics
        jsonschema.validate(record.checked(record.fill_defaults(metrics)), record.metrics_schema())


@pytest.mark.parametrize("content", OLDER, ids=NAMES)
def test_every_version_is_read_and_shown(tmp_path, content, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # names are not cut into lines
    metrics = record.fill_defaults(content)
    assert set(metrics) == {field.name for field in record.Metrics.__dataclass_fields__.values()}
    assert metrics["scores"].keys() == content["scores"].keys()
    assert metrics["mean"]["score"] == content["mean"]["score"] and metrics["status"] == content["status"]
    store = RunStore(tmp_path, content["run_id"])
    with store.hold():
        store.start(config(tmp_path))
        (store.path / "metrics.json").write_text(json.dumps(content))
    assert store.problem() is None
    shows = [["--show", store.run_id, "--format", form] for form in ("screen", "markdown", "csv")]
    for arguments in (["--list"], *shows):
        assert report.main(["--results", str(tmp_path), *arguments]) == 0
        shown = capsys.readouterr().out
        assert content["label"].split()[0] in shown
    rewritten = record.checked({**metrics, "schema_version": record.SCHEMA_VERSION})
    jsonschema.validate(rewritten, record.metrics_schema())


def test_the_fixtures_cover_all_that_a_run_may_hold():
    entries = [entry for content in OLDER for entry in content["scores"].values()]
    assert any(entry.get("points") for entry in entries) and any(entry.get("perplexity") for entry in entries)
    assert any(content.get("speculation") for content in OLDER) and any(content.get("baseline") for content in OLDER)
    assert {"left_out" in content["samples"] for content in OLDER} == {True, False}
    assert {"code" in content for content in OLDER} == {True, False}


@pytest.mark.parametrize("place", [TABLE, LIST])
def test_a_new_column_is_one_entry_and_older_runs_are_shown(tmp_path, monkeypatch, capsys, place):
    entry = Column(
        "prompt tokens",
        "tokens",
        lambda line: Cell(str(line.run.samples.prompt_tokens.max or "-")),
        {"prompt_tokens": lambda line: line.run.samples.prompt_tokens.max},
        places=(place,),
    )
    monkeypatch.setattr(columns, "COLUMNS", [*columns.COLUMNS, entry])
    runs = []
    for content in OLDER[:3]:
        content = copy.deepcopy(content)
        content["run_id"] = f"0123456789-{len(runs):010}"
        if not runs:
            del content["samples"]["prompt_tokens"]  # a run from before the figure was recorded
        runs.append(content)
        store = RunStore(tmp_path, content["run_id"])
        with store.hold():
            store.start(config(tmp_path))
            (store.path / "metrics.json").write_text(json.dumps(content))
    known = str(runs[1]["samples"]["prompt_tokens"]["max"])
    rows = list(csv.DictReader(io.StringIO(tables.runs_csv(runs))))
    assert [row["prompt_tokens"] for row in rows] == ["", known, str(runs[2]["samples"]["prompt_tokens"]["max"])]
    header, first, second, *_ = (
        tables.runs_markdown(runs).splitlines()[:1] + tables.runs_markdown(runs).splitlines()[2:]
    )
    if place == TABLE:
        assert header.endswith("| prompt tokens |")
        assert first.endswith("| - |") and second.endswith(f"| {known} |")
        assert "prompt tokens" in tables.table_text(runs, 160, color=False)
        arguments = ["--show", *(content["run_id"] for content in runs)]
    else:
        assert "prompt tokens" not in header
        arguments = ["--list"]
    monkeypatch.setenv("COLUMNS", "200")
    assert report.main(["--results", str(tmp_path), *arguments]) == 0
    assert "prompt tokens" in capsys.readouterr().out


def test_headings_of_the_csv_are_told_apart():
    for entries in (columns.COLUMNS, point_columns.POINT_COLUMNS):
        headings = [heading for column in entries for heading in column.csv]
        assert len(headings) == len(set(headings)) > 10


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (("mean",), None, "mean is not an object"),
        (("tokens_per_s",), True, "tokens_per_s is not a number"),
        (("tokens_per_s",), float("inf"), "tokens_per_s is not a number"),
        (("samples", "done"), 1.5, "samples.done is not a whole number"),
        (("samples", "left_out"), "all", "samples.left_out is not a list"),
        (("kv_bytes", "used"), [], "kv_bytes.used is not an object"),
        (("peak_bytes", "kind"), 3, "peak_bytes.kind is not one of cuda_allocator, cpu_live_tensors"),
    ],
)
def test_what_is_no_record_is_named(place, content, message):
    damaged = copy.deepcopy(OLDER[0])
    group = damaged
    for name in place[:-1]:
        group = group[name]
    group[place[-1]] = content
    assert record.problem(damaged) == message


def test_a_key_that_is_not_in_the_record_is_refused_in_writing_and_ignored_in_reading():
    content = {**OLDER[-1], "of another version": 1}
    assert record.problem(content) is None and "of another version" not in record.fill_defaults(content)
    with pytest.raises(typed.ShapeError, match="of another version is not a key of Metrics"):
        record.checked(content)


def test_a_status_of_a_later_version_is_shown(tmp_path):
    content = record.fill_defaults({**OLDER[0], "status": "paused"})
    assert "paused" in tables.table_text([content], 120, color=False)


def test_an_fp16_run_brings_a_run_of_an_older_version_up_to_date(tmp_path):
    mine = answer_run(config(tmp_path, dataset={"limit": 2}))
    store = store_of(mine)
    new = ("sources", "older", "baseline_differs")
    version1 = {key: value for key, value in on_disk(mine).items() if key not in new}
    store.write_metrics({**version1, "schema_version": 1})
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    written = json.loads((store.path / "metrics.json").read_text())
    jsonschema.validate(written, record.metrics_schema())
    assert all(entry["vs_fp16"] for entry in written["scores"].values())


def test_parts_that_contradict_each_other_are_named():
    points = copy.deepcopy(OLDER[NAMES.index("2-points")])
    assert record.problem(points) is None
    assert record.problem({**points, "status": "oom", "oom": None}) == "status is oom, but the key oom is missing"
    name, entry = next(iter(points["scores"].items()))
    whole = name.partition("@")[0]
    assert (record.problem({**points, "scores": {whole: entry}}) or "").startswith(f"scores.{whole} ")
    (batch,) = entry["points"]["batches"]
    figures = entry["points"]["batches"].pop(batch)
    entry["points"]["batches"]["many"] = figures
    assert record.problem(points) == f"scores.{name}.points.batches.many: many is not a batch size"
    entry["points"]["batches"] = {batch: {**figures, "tokens_per_s": None}}
    assert record.problem(points) == f"scores.{name}.points.batches.{batch}.tokens_per_s is missing"
    entry["points"]["batches"][batch]["status"] = "oom"
    assert record.problem(points) is None
