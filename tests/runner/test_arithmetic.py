"""The arithmetic of a run: outside its id, in every row, and kept by what is compared. Runs of an earlier commit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import report
from kvbench.models import arithmetic
from kvbench.results.samples import MEASURED
from kvbench.runner.run import answer_run
from kvbench.runner.stored import OlderCodeError
from tests.run_files import on_disk, store_of
from tests.run_support import config

#: runs of the bundled model at commit c91ff693: fp16 and kivi in bfloat16; kivi under model.dtype=auto, float32 then
STORED = Path(__file__).parent / "stored_at_c91ff693"
FP16, KIVI, AUTO = "f7e1226752-efa1a561c3", "f7e1226752-11ded018ab", "7c0040227b-11ded018ab"


@pytest.fixture(autouse=True)
def slow_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which auto chooses float32."""
    monkeypatch.delenv(arithmetic.VARIABLE)
    monkeypatch.setattr(arithmetic, "faster_in_float32", lambda dtype: True)


def toy(folder: Path, name: str = "kivi", limit: int = 1, wanted: str = "auto", **runtime: Any) -> dict[str, Any]:
    runtime |= {"arithmetic": wanted}
    return config(folder, name, model={"dtype": "auto"}, dataset={"limit": limit}, runtime=runtime)


def dtypes(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    rows = store_of(metrics).samples().rows.values()
    return [(row[MEASURED]["dtype"], row[MEASURED]["arithmetic"]) for row in rows]


def test_arithmetic_changes_neither_the_id_nor_the_bytes(tmp_path: Path) -> None:
    made = {
        wanted: answer_run(toy(tmp_path / wanted, limit=2, wanted=wanted)) for wanted in ("auto", "storage", "float32")
    }
    assert len({metrics["run_id"] for metrics in made.values()}) == 1
    assert made["auto"]["kv_bytes"] == made["storage"]["kv_bytes"] == made["float32"]["kv_bytes"]
    assert dtypes(made["auto"]) == dtypes(made["float32"]) == [("bfloat16", "float32")] * 2
    assert dtypes(made["storage"]) == [("bfloat16", "bfloat16")] * 2
    env = on_disk(made["auto"])["env"]
    assert (env["dtype"], env["arithmetic"], env["usual_dtype"]) == ("bfloat16", "float32", "bfloat16")


def test_a_run_keeps_the_arithmetic_of_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer_run(toy(tmp_path, wanted="storage"))
    assert dtypes(answer_run(toy(tmp_path, limit=2))) == [("bfloat16", "bfloat16")] * 2
    assert "computes in" not in capsys.readouterr().err
    assert dtypes(answer_run(toy(tmp_path, limit=3, wanted="float32"))) == [("bfloat16", "bfloat16")] * 3
    said = capsys.readouterr().err
    assert "computes in runtime.arithmetic=storage, as for its 2 stored samples, not in float32" in said
    assert dtypes(answer_run(toy(tmp_path, limit=3, wanted="float32", rerun="all"))) == [("bfloat16", "float32")] * 3


def test_a_run_stored_in_float32_has_no_arithmetic_to_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in (1, 2):
        config = toy(tmp_path, limit=limit, wanted="storage")
        assert (
            dtypes(answer_run({**config, "model": {**config["model"], "dtype": "float32"}}))
            == [("float32",) * 2] * limit
        )
    assert "computes in" not in capsys.readouterr().err


@pytest.mark.parametrize(("first", "second"), [("kivi", "fp16"), ("fp16", "kivi")])
def test_runs_that_are_compared_share_their_arithmetic(first: str, second: str, tmp_path: Path) -> None:
    answer_run(toy(tmp_path, first, wanted="storage"))
    assert dtypes(answer_run(toy(tmp_path, second))) == [("bfloat16", "bfloat16")]
    other = answer_run(toy(tmp_path, second, wanted="float32", rerun="all"))  # named: nothing is taken over
    assert dtypes(other) == [("bfloat16", "float32")]


def test_a_worker_process_takes_over_the_arithmetic(tmp_path: Path) -> None:
    answer_run(toy(tmp_path, wanted="storage"))
    assert dtypes(answer_run(toy(tmp_path, limit=3, workers=2))) == [("bfloat16", "bfloat16")] * 3


def tiny(folder: Path, dtype: str = "bfloat16", limit: int = 1, **runtime: Any) -> dict[str, Any]:
    """The command of :data:`STORED` for kivi."""
    import yaml

    content: dict[str, Any] = yaml.safe_load((STORED / KIVI / "config.yaml").read_text(encoding="utf-8"))
    content["model"]["dtype"] = dtype
    content["dataset"]["limit"] = limit
    content["runtime"] |= {"results_dir": str(folder), **runtime}
    return content


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "runs"))


def test_runs_of_an_earlier_commit_are_reported(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--results", str(stored), "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(run_id in listed for run_id in (FP16, KIVI, AUTO))
    assert report.main(["--results", str(stored), "--show", AUTO]) == 0
    shown = capsys.readouterr().out
    assert "storage" in shown and "float32" in shown
    assert report.main(["--results", str(stored), "--show", KIVI]) == 0
    assert "storage" not in capsys.readouterr().out
    assert report.main(["--results", str(stored), "--compare", KIVI, AUTO]) == 0
    assert "kivi int2 dtype=float32, tiny" in capsys.readouterr().out


def test_rows_stored_in_float32_under_auto_are_older(stored: Path) -> None:
    metrics = answer_run(tiny(stored, "auto"))
    assert metrics["run_id"] == AUTO and metrics["status"] == "older" and "storage" in metrics["older"]["parts"]
    with pytest.raises(OlderCodeError, match=r"storage \(was float32, is 16 bits\)"):
        answer_run(tiny(stored, "auto", limit=2, mix_code=True))
    anew = answer_run(tiny(stored, "auto", rerun=True))
    assert dtypes(anew) == [("bfloat16", "float32")] and anew["older"] is None
    before = json.loads((STORED / KIVI / "metrics.json").read_text(encoding="utf-8"))
    assert anew["kv_bytes"] == before["kv_bytes"]


def test_a_run_of_an_earlier_commit_resumes_in_its_arithmetic(stored: Path) -> None:
    metrics = answer_run(tiny(stored, limit=2, mix_code=True))
    assert metrics["run_id"] == KIVI and metrics["baseline"] == FP16 and "storage" not in metrics["older"]["parts"]
    rows = list(store_of(metrics).samples().rows.values())
    assert [row[MEASURED].get("arithmetic") for row in rows] == [None, "bfloat16"]
    before = json.loads((STORED / KIVI / "samples.jsonl").read_text(encoding="utf-8"))
    del before["crc"]
    # the scorer's code may have changed since: the prediction is then scored again
    before[MEASURED]["code"]["scorer"] = rows[0][MEASURED]["code"]["scorer"]
    assert rows[0] == before
