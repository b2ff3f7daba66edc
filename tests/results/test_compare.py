"""Two runs sample by sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from experiments.page.made import run_id, write_made_run
from kvbench.cli import report
from kvbench.results import compare
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run
from tests.run_support import config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("runs")
    ids = [answer_run(config(folder, name))["run_id"] for name in ("fp16", "kivi")]
    return folder, ids[0], ids[1]


def test_differences_are_the_paired_ones(pair: tuple[Path, str, str]) -> None:
    folder, a, b = pair
    comparison = compare.compare_runs(RunStore(folder, a), RunStore(folder, b))
    metrics = RunStore(folder, b).metrics()
    assert metrics is not None
    for key, entry in metrics["scores"].items():
        assert comparison.keys[key]["diff"] == entry["vs_fp16"]["diff"]
        assert comparison.keys[key]["stderr"] == entry["vs_fp16"]["stderr"]
        assert comparison.keys[key]["nll"].items() <= entry["nll"]["vs_fp16"].items()
        assert (comparison.keys[key]["low"], comparison.keys[key]["high"]) == (
            entry["vs_fp16"]["low"],
            entry["vs_fp16"]["high"],
        )
    assert not comparison.notes
    back = compare.compare_runs(RunStore(folder, b), RunStore(folder, a))
    for key, entry in comparison.keys.items():
        assert back.keys[key]["diff"] == pytest.approx(-entry["diff"])


def test_changed_samples_and_notes(pair: tuple[Path, str, str]) -> None:
    folder, a, b = pair
    store = RunStore(folder, b)
    row = next(iter(store.samples().rows.values()))
    before = len(compare.compare_runs(RunStore(folder, a), store).changed)
    store.append([{**row, "prediction": "x | y", "scores": {**row["scores"], "score": 9.0}}])
    comparison = compare.compare_runs(RunStore(folder, a), store)
    assert len(comparison.changed) >= max(1, before)
    assert comparison.changed[0]["id"] == row["id"]
    assert "x \\| y" in compare.comparison_markdown(comparison)
    other = answer_run(config(folder, "kivi", dataset={"limit": 2, "seed": 3}))["run_id"]
    assert any("not only in the method" in note for note in compare.compare_runs(store, RunStore(folder, other)).notes)


def test_the_command(pair: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, a, b = pair
    for form in ("screen", "markdown", "csv"):
        assert report.main(["--results", str(folder), "--compare", a, b, "--format", form]) == 0
        assert "first" in capsys.readouterr().out
    assert report.main(["--results", str(folder), "--compare", a, "zzz"]) == 1
    assert "no run zzz" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["model", "dataset"])
@pytest.mark.parametrize("value", [[1], "mini", None])
def test_a_damaged_config_does_not_end_the_comparison(tmp_path: Path, group: str, value: object) -> None:
    write_made_run(tmp_path, 1)
    store = write_made_run(tmp_path, 2)
    config_path = store.path / "config.yaml"
    config_path.write_text(yaml.safe_dump({**(store.config() or {}), group: value}))
    assert report.main(["--results", str(tmp_path), "--compare", run_id(1), run_id(2)]) == 0


def test_several_answers_to_a_problem_are_one_change() -> None:
    """Five answers to each of two problems are lost together: p is that of two changes, not of ten."""

    def rows(score: float) -> dict[str, dict[str, object]]:
        one = {"task": "t", "length": None, "tokens": [1], "scores": {"score": score}}
        return {f"t/{p}~{k}": {**one, "id": f"t/{p}~{k}", "problem": f"t/{p}"} for p in range(2) for k in range(5)}

    answers, _ = compare._more(rows(1.0), rows(0.0), list(rows(0.0)))
    assert (answers["t"]["flips"]["lost"], answers["t"]["flips"]["p"]) == (10, 0.5)
    alone = {name: {**row, "problem": name} for name, row in rows(0.0).items()}
    answers, _ = compare._more(rows(1.0), alone, list(alone))
    assert answers["t"]["flips"]["p"] == 2 / 2**10
