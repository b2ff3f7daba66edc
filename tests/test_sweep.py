"""A sweep with jobs that fail: every job is a row of the one table, best first; again, only what failed is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.results import aggregate, ranking, tables

FLAKY = """
from dataclasses import dataclass
from pathlib import Path

from kvbench.methods.cocktail import Cocktail


@dataclass(kw_only=True)
class Flaky(Cocktail):
    def plan(self, prompts, row):
        if (self.alpha, self.beta) == (0.6, 0.1) and Path("damaged").exists():
            raise RuntimeError("a damaged embedding")
        return super().plan(prompts, row)
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
    built_in = Path(__file__).parent.parent / "conf" / "method" / "cocktail.yaml"
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
        " dataset=mini/key_value_hex dataset.lengths=[512] dataset.limit=1 runtime.device=cpu logger=none"
    ).split()

    assert main(command) == 1
    said = capsys.readouterr()
    rows = [line for line in said.out.splitlines() if line.startswith("flaky")]
    assert len(rows) == 4
    assert ["alpha=0.6 beta=0.1" in row or "alpha=0.9 beta=0.1" in row for row in rows] == [False] * 2 + [True] * 2
    assert "4 jobs: 2 ok, 2 error" in said.err
    assert "a damaged embedding" in said.err
    assert "the thresholds cross" in said.err
    before = runs(tmp_path)
    assert len(before) == 2

    assert main(command) == 1
    said = capsys.readouterr()
    assert "4 jobs: 2 ok (2 of them done before), 2 error" in said.err
    assert runs(tmp_path) == before

    Path("damaged").unlink()
    assert main(command) == 1
    assert "4 jobs: 3 ok (2 of them done before), 1 error" in capsys.readouterr().err
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
    assert "error" in tables.summary([row], 100, color=False)
    assert tables.to_csv([row]).splitlines()[1].startswith("cocktail,,error")
    assert "cocktail (error)" in tables.markdown([row])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # no job can run
        ("method=cocktail method.alpha=0.9,0.95 method.beta=0.1,0.2", "the thresholds cross"),
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
