"""The plan of a sweep: the order of jobs, their labels, what a launcher gets, and fp16 references.

A sweep with jobs that fail: every job is a row of the one table, best first; again, only what failed is run.
"""

from __future__ import annotations

import csv
import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cli import plan
from kvbench.cli.main import main
from kvbench.errors import KvbenchError
from kvbench.results import aggregate, ranking, tables
from kvbench.results.sweeps import Job


def jobs(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


def typed(planned: list[Job]) -> list[str]:
    assert [job.number for job in planned] == list(range(len(planned)))
    return [" ".join(job.overrides) for job in planned]


def test_jobs_of_a_model_are_adjacent_and_fp16_is_first() -> None:
    grid = [f"method={m} model={n} dataset={d}" for m in ("kivi", "fp16") for n in "ab" for d in "xy"]
    assert typed(plan.ordered(jobs(*grid))) == [
        f"method={m} model={n} dataset={d}" for n in "ab" for m in ("fp16", "kivi") for d in "xy"
    ]


def test_jobs_that_share_a_prefill_are_adjacent() -> None:
    grid = [f"method={m} dataset={d} {plan.SHARED}=true" for m in ("kivi", "fp16") for d in "xy"]
    assert typed(plan.ordered(jobs(*grid))) == [
        f"method={m} dataset={d} {plan.SHARED}=true" for d in "xy" for m in ("fp16", "kivi")
    ]


@pytest.mark.parametrize("option", ["runtime.device=cpu,cuda", "model.dtype=float32,bfloat16", "runtime.seed=0,1"])
def test_options_that_decide_which_model_is_loaded_come_first(option: str) -> None:
    key, _, values = option.partition("=")
    grid = [f"method={m} {key}={value}" for m in ("kivi", "atom") for value in values.split(",")]
    assert [line.split()[1] for line in typed(plan.ordered(jobs(*grid)))] == [
        f"{key}={value}" for value in values.split(",") for _ in range(2)
    ]


def test_jobs_that_need_no_other_order_stay_as_typed() -> None:
    grid = [f"method=cocktail method.alpha={a} method.beta={b}" for a in (0.6, 0.9) for b in (0.05, 0.1)]
    assert typed(plan.ordered(jobs(*grid))) == grid


def test_an_fp16_reference_is_added_once_where_there_is_none() -> None:
    grid = [f"method={m} dataset={d}" for m in ("kivi", "atom") for d in "xy"]
    first = typed(plan.ordered(jobs(*grid, "method=fp16 dataset=x"), with_fp16=True))
    assert first == [f"method={m} dataset={d}" for m in ("fp16", "kivi", "atom") for d in "xy"]
    assert "setting=fp16 a=1" in typed(plan.ordered(jobs("setting=fp16 a=1", "setting=kivi:int2 a=1"), with_fp16=True))
    assert len(plan.ordered(jobs("setting=fp16 a=1", "setting=kivi:int2 a=1"), with_fp16=True)) == 2
    assert typed(plan.ordered(jobs("dataset=x"), with_fp16=True)) == ["dataset=x"], "the default method is fp16"


def test_the_method_of_a_preset_is_not_taken_for_fp16() -> None:
    preset = "experiment=quickstart/kivi4"
    assert typed(plan.ordered(jobs(preset), with_fp16=True)) == [f"method=fp16 quantizer=none {preset}", preset]
    assert typed(plan.ordered(jobs("experiment=null"), with_fp16=True)) == ["experiment=null"]
    own = [f"method=fp16 quantizer=none {preset}", preset]
    assert typed(plan.ordered(jobs(*own), with_fp16=True)) == own


def test_jobs_are_named_by_what_varies() -> None:
    grid = jobs("method=kivi quantizer=int2 method.residual=32", "method=kivi quantizer=int4 method.residual=32")
    assert plan.labels(grid) == ["int2", "int4"]
    grid = jobs("method=kivi quantizer.key.bits=2", "method=kivi quantizer.value.bits=2", "method=fp16")
    assert plan.labels(grid) == ["kivi quantizer.key.bits=2", "kivi quantizer.value.bits=2", "fp16"]
    assert plan.labels(jobs("method=kivi dataset=mini")) == ["kivi"]
    assert plan.labels([["dataset=mini"]]) == ["mini"]
    assert plan.labels(jobs("setting=kivi:int2:residual=64 a.b=1", "setting=fp16 a.b=2")) == [
        "kivi:int2:residual=64 b=1",
        "fp16 b=2",
    ]


def test_only_jobs_that_ask_for_it_and_differ_in_the_method_are_one_unit() -> None:
    grid = [f"method={m} dataset={d} runtime.shared_prefill=true" for d in "xy" for m in ("fp16", "kivi", "h2o")]
    planned = plan.ordered(jobs(*grid))
    assert [[job.number for job in unit] for unit in plan.units(planned)] == [[0, 1, 2], [3, 4, 5]]
    assert [len(unit) for unit in plan.units(plan.ordered(jobs("method=a d=1", "method=b d=1")))] == [1, 1]
    assert [len(unit) for unit in plan.units([])] == []


def test_hydra_hands_overrides_through_as_they_were_typed() -> None:
    texts = (
        "dataset.template='Q: {question} A:'",
        'model.path="/a b/it\'s | here\\n"',
        "decoding.stop=['\\n','${x}']",
        "a=100%20 1+1",
    )
    unit = [Job(number=3, overrides=texts, label=""), Job(number=12, overrides=("method=fp16",), label="")]
    other = [Job(number=4, overrides=(), label="")]
    (override,) = OverridesParser.create().parse_overrides([plan.for_hydra([unit, other])])
    values = list(override.sweep_string_iterator())
    parsed = OverridesParser.create().parse_overrides([f"+{plan.JOB}={value}" for value in values])
    assert [plan.decoded(str(one.value())) for one in parsed] == [
        [(3, list(texts)), (12, ["method=fp16"])],
        [(4, [])],
    ]


FLAKY = """
from dataclasses import dataclass
from pathlib import Path

from kvbench.methods.cocktail import Cocktail


@dataclass(kw_only=True)
class Flaky(Cocktail):
    def plan(self, prompts, row, *more):
        if (self.alpha, self.beta) == (0.6, 0.1) and Path("damaged").exists():
            raise RuntimeError("a damaged embedding")
        return super().plan(prompts, row, *more)
"""


def runs(root: Path) -> dict[str, int]:
    """Time of the last sample of each run, by run."""
    return {path.parent.name: os.stat(path).st_mtime_ns for path in root.glob("results/runs/*/samples.jsonl")}


def test_failed_jobs_are_rows_and_a_second_call_runs_only_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bm25s")
    group = tmp_path / "mine" / "method"
    group.mkdir(parents=True)
    built_in = Path(__file__).parents[2] / "conf" / "method" / "cocktail.yaml"
    text = built_in.read_text(encoding="utf-8").replace("kvbench.methods.cocktail.Cocktail", "flaky.Flaky")
    (group / "flaky.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "mine" / "flaky.py").write_text(FLAKY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    monkeypatch.setenv("COLUMNS", "160")
    Path("damaged").touch()
    # 0.9 + 0.1 cross; 0.6 with 0.1 fails at its first sample
    command = (
        "--config-dir mine --multirun method=flaky method.encoder=bm25 method.alpha=0.6,0.9 method.beta=0.05,0.1"
        " dataset=mini/key_value_hex dataset.lengths=[512] dataset.limit=1 decoding.max_new_tokens=2"
        " runtime.device=cpu logger=none"
    ).split()

    assert main(command) == 1
    captured = capsys.readouterr()
    rows = [line for line in captured.out.splitlines() if line.startswith("flaky") and "  " in line]  # no notes
    assert len(rows) == 4
    assert ["alpha=0.6 beta=0.1" in row or "alpha=0.9 beta=0.1" in row for row in rows] == [False] * 2 + [True] * 2
    assert "4 jobs: 2 ok, 2 error" in captured.err
    assert "a damaged embedding" in captured.err
    assert "is too large for method.beta" in captured.err
    before = runs(tmp_path)
    assert len(before) == 2

    Path("damaged").unlink()
    assert main(command) == 1  # one of the two that failed fails again
    assert "4 jobs: 3 ok (2 of them were already done), 1 error" in capsys.readouterr().err
    after = runs(tmp_path)
    assert len(after) == 3
    assert {name: after[name] for name in before} == before


def test_best_first_then_fewer_bytes_then_as_they_came() -> None:
    def row(name: str, score: float | None, held: int | None, status: str = "ok", ppl: float | None = None) -> dict:
        scores = {"t": {"score": score, "stderr": None, "n": 1, "vs_fp16": None, "perplexity": ppl and {"ppl": ppl}}}
        return {
            "label": name,
            "status": status,
            "scores": scores,
            "mean": aggregate.overall(scores),
            "kv_bytes": {"used": {"total": held}},
        }

    rows = [
        row("error", 1.0, 1, "error"),
        row("low", 0.2, 10),
        row("ppl 5", None, 10, ppl=5.0),
        row("large", 0.9, 30),
        row("small", 0.9, 20),
        row("small too", 0.9, 20),
        row("nothing", None, None),
        row("ppl 4", None, 10, ppl=4.0),
        row("oom", None, None, "oom"),
    ]
    names = [run["label"] for run in ranking.best_first(rows)]
    assert names == ["small", "small too", "large", "low", "ppl 4", "ppl 5", "nothing", "error", "oom"]


def test_a_job_that_could_not_begin_fits_the_tables() -> None:
    config = {
        "model": {"name": "tiny"},
        "method": {"_target_": "kvbench.methods.cocktail.Cocktail", "alpha": 0.9},
        "quantizer": {"name": "none"},
        "dataset": {"name": "mini"},
        "decoding": {},
        "runtime": {},
    }
    row = ranking.failed(config, "why")
    assert "error" in tables.table_text([row], 100, color=False)
    assert tables.runs_csv([row]).splitlines()[1].startswith("cocktail,,error")
    assert "cocktail (error)" in tables.runs_markdown([row])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # no job can run
        ("method=cocktail method.alpha=0.9,0.95 method.beta=0.1,0.2", "is too large for method.beta"),
        # a value that no job can run with
        ("method=cocktail method.alpha=0.4,0.6 method.chunk_size=32,48", "must divide method.chunk_size=48"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--multirun", *line.split()]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_two_sweeps_of_one_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.chdir(tmp_path)

    class Still:
        @staticmethod
        def now() -> datetime:
            return datetime(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(plan, "datetime", Still)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: plan.new_folder(), range(24)))
    assert len(set(folders)) == 24
    assert all(folder.is_dir() and folder.name.startswith("2026-01-02_03-04-05") for folder in folders)
    (tmp_path / "file").touch()
    monkeypatch.setattr(plan, "SWEEPS", tmp_path / "file" / "sweeps")
    with pytest.raises(KvbenchError, match="cannot be created"):
        plan.new_folder()


def test_what_is_no_record_of_this_sweep_is_said_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.TOKEN, "")
    outcome = {"status": "ok", "message": "", "overrides": ["a=1"], "number": 0}
    plan.begin()
    plan.record(tmp_path, 7, {**outcome, "number": 7})
    plan.begin()
    for number in (11, 2):
        plan.record(tmp_path, number, {**outcome, "number": number})
    bad = {
        "job-0001.json": "{",
        "job-0003.json": "[1]",
        "job-0004.json": json.dumps({**outcome, "number": "4"}),
        "job-0005.json": json.dumps({**outcome, "number": 5, "metrics": {"status": "ok"}}),
        "job-0006.json": "[" * 50_000,
        "job-0008.json": json.dumps({"status": "ok"}),
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "job-0009.json").mkdir()
    (tmp_path / "job-0010.json").write_text(json.dumps({**outcome, "number": 10}))  # of a worker that knew no name
    messages: list[str] = []
    assert [each["number"] for each in plan.outcomes(tmp_path, messages.append)] == [2, 10, 11]
    skipped = {Path(line.split(": ", 1)[0]).name for line in messages}
    assert skipped == {*bad, "job-0009.json", "job-0007.json"}
    assert next(line for line in messages if "job-0007" in line).endswith("belongs to another sweep; skipped")


def test_a_sweep_keeps_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        "--multirun method=fp16,kivi dataset=mini/key_value_hex dataset.lengths=[512] dataset.limit=1"
        " decoding.max_new_tokens=2 runtime.device=cpu logger=none"
    ).split()
    assert main(command) == 0
    captured = capsys.readouterr()
    (folder,) = (tmp_path / "results" / "sweeps").iterdir()
    assert f"table: {folder.relative_to(tmp_path)}/table.md" in captured.err
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert {line.split("|")[1].strip() for line in text.splitlines()[2:]} == {"fp16", "kivi int2"}
    rows = list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["run"] for row in rows} == {"fp16", "kivi int2"}
    assert {row["status"] for row in rows} == {"ok"}


def test_presets_of_one_class_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = tmp_path / "mine" / "method"
    group.mkdir(parents=True)
    built_in = Path(__file__).parents[2] / "conf" / "method" / "kivi.yaml"
    text = built_in.read_text(encoding="utf-8")
    (group / "kivi_wide.yaml").write_text(text.replace("residual: 128", "residual: 64"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = (
        "--config-dir mine --multirun method=kivi,kivi_wide dataset=mini/key_value_hex dataset.lengths=[512]"
        " dataset.limit=1 decoding.max_new_tokens=2 runtime.device=cpu logger.path=runs.csv"
    ).split()
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "kivi int2: 1 samples" in captured.err and "kivi_wide int2: 1 samples" in captured.err
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["method"] for row in rows] == ["kivi", "kivi_wide"]
    ids = sorted(path.parent.name for path in tmp_path.glob("results/runs/*/metrics.json"))
    assert len(ids) == 2
