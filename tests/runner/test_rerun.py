"""Stored samples that are repeated on demand: for their times alone, or whole; and repetitions that were cut off."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KvbenchError
from kvbench.results import samples
from kvbench.results.samples import MEASURED, outputs
from kvbench.results.sweeps import TOKEN
from kvbench.runner import sources
from kvbench.runner.run import answer_run
from kvbench.runner.session import Session
from kvbench.runner.shared_runs import run_together
from tests.run_files import on_disk, store_of
from tests.run_support import config


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the samples that have run, in order."""
    monkeypatch.delenv(TOKEN, raising=False)
    ids: list[str] = []
    real = Session.rows

    def rows(self: Session, batch: Any) -> Any:
        ids.extend(sample.id for sample in batch)
        return real(self, batch)

    monkeypatch.setattr(Session, "rows", rows)
    return ids


def rewrite(metrics: dict[str, Any], **changes: Any) -> dict[str, samples.Row]:
    """Change stored rows as if they had been made so; returns them."""
    store = store_of(metrics)
    rows = copy.deepcopy(store.samples().rows)
    for row in rows.values():
        row[MEASURED] |= {"ttft_s": 77.0, "step_s": [77.0]}
    for key, change in changes.items():
        rows[key].update(change)
    store.samples_path.unlink()
    samples.append(store.samples_path, list(rows.values()))
    return rows


def again(folder: Path, mode: Any = "times", **dataset: Any) -> dict[str, Any]:
    return answer_run(config(folder, runtime={"rerun": mode}, dataset=dataset))


def test_times_are_made_again_and_answers_are_kept(tmp_path: Path, ran: list[str], capsys: Any) -> None:
    first = answer_run(config(tmp_path))
    before = rewrite(first, **{"second/1": {"prediction": "something else", "scores": {"score": 0.125, "length": 1.0}}})
    ran.clear()
    capsys.readouterr()
    done = again(tmp_path)
    assert len(ran) == 4 and done["status"] == "ok" and done["run_id"] == first["run_id"]
    after = store_of(done).samples().rows
    assert {name: outputs(row) for name, row in after.items()} == {name: outputs(row) for name, row in before.items()}
    assert all(row[MEASURED]["ttft_s"] != 77.0 and 77.0 not in row[MEASURED]["step_s"] for row in after.values())
    said = " ".join(capsys.readouterr().err.split())
    assert "4 of 4 stored samples are repeated, because runtime.rerun=times; answers and scores are kept" in said
    assert "1 of 4 samples gave another answer than the stored one" in said
    assert "times are those of the other: second/1 hint: set runtime.rerun=all" in said
    assert on_disk(done)["scores"] == done["scores"]
    again(tmp_path)
    assert len(ran) == 8, "the next command repeats them once more"


def test_all_is_made_anew(tmp_path: Path, ran: list[str]) -> None:
    first = answer_run(config(tmp_path))
    honest = {name: outputs(row) for name, row in store_of(first).samples().rows.items()}
    rewrite(first, **{"second/1": {"prediction": "something else"}})
    ran.clear()
    done = again(tmp_path, "all")
    assert len(ran) == 4
    assert {name: outputs(row) for name, row in store_of(done).samples().rows.items()} == honest


@pytest.mark.parametrize("mode", ["times", "all"])
def test_what_was_cut_off_goes_on_where_it_stopped(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    first = answer_run(config(tmp_path))
    rewrite(first)
    ran.clear()
    counted = Session.rows

    def cut(self: Session, batch: Any) -> Any:
        if len(ran) == 2:
            raise KeyboardInterrupt
        return counted(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", cut)
        with pytest.raises(KeyboardInterrupt):
            again(tmp_path, mode)
    assert len(store_of(first).samples().rows) == 4, "what is not yet repeated is still there"
    done = again(tmp_path, mode, limit=5)
    assert len(ran) == len(set(ran)) == 5, "each once, and the sample that was not there before"
    assert done["status"] == "ok" and done["samples"]["done"] == 5
    assert not any(77.0 in row[MEASURED]["step_s"] for row in store_of(done).samples().rows.values())


def test_a_job_of_a_sweep_is_repeated_once_for_that_sweep(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_run(config(tmp_path))
    monkeypatch.setenv(TOKEN, "one")
    again(tmp_path)
    again(tmp_path)
    assert len(ran) == 8, "a continued sweep finds it done"
    monkeypatch.setenv(TOKEN, "two")
    again(tmp_path)
    assert len(ran) == 12


@pytest.mark.parametrize("mode", ["times", "all"])
def test_older_code_is_made_anew_but_has_no_new_times(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    answer_run(config(tmp_path))
    now = sources.code(config(tmp_path))
    monkeypatch.setattr(sources, "code", lambda config: {**now, "method": "0" * 12})
    if mode == "all":
        assert again(tmp_path, mode)["status"] == "ok" and len(ran) == 8
        return
    with pytest.raises(KvbenchError, match="4 of 4 stored samples were made by older code") as refusal:
        again(tmp_path)
    assert "runtime.rerun=true" in str(refusal.value) and "runtime.rerun=all" in str(refusal.value)
    assert len(ran) == 4


@pytest.mark.parametrize("mode", [True, "times", "all"])
def test_memory_that_ran_out_is_tried_again_under_all_alone(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    counted = Session.rows

    def full(self: Session, batch: Any) -> Any:
        if len(ran) == 2:
            raise MemoryError("out of memory")
        return counted(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", full)
        assert answer_run(config(tmp_path))["status"] == "oom"
    ran.clear()
    done = again(tmp_path, mode)
    assert (done["status"], len(ran)) == {True: ("oom", 0), "times": ("oom", 2), "all": ("ok", 4)}[mode]


def test_runs_over_one_prefill_are_repeated_together(tmp_path: Path, ran: list[str], monkeypatch: Any) -> None:
    from kvbench.runner import shared_runs

    runs = [config(tmp_path, name) for name in ("fp16", "kivi")]
    made = [store_of(result).samples().rows for result in run_together(runs)]  # type: ignore[arg-type]
    batches: list[int] = []
    real = shared_runs.shared_rows
    monkeypatch.setattr(
        shared_runs, "shared_rows", lambda sessions, batch: batches.append(len(sessions)) or real(sessions, batch)
    )
    repeated = run_together([{**one, "runtime": {**one["runtime"], "rerun": "times"}} for one in runs])
    assert batches == [2] * 4
    for before, result in zip(made, repeated, strict=True):
        after = store_of(result).samples().rows  # type: ignore[arg-type]
        assert {name: outputs(row) for name, row in after.items()} == {
            name: outputs(row) for name, row in before.items()
        }
        assert all(after[name][MEASURED]["step_s"] != before[name][MEASURED]["step_s"] for name in after)


def test_points_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.measure.meter import Meter

    measured: list[tuple[int, int]] = []
    real = Meter.point

    def point(self: Meter, prompt: int, batch: int) -> dict[str, Any]:
        measured.append((prompt, batch))
        return real(self, prompt, batch)

    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(Meter, "point", point)
    data = {"_target_": "kvbench.tasks.efficiency.Efficiency", "name": "efficiency", "prompts": [32], "batches": [1, 2]}
    settings = {**config(tmp_path, "fp16"), "dataset": {**data, "new_tokens": 2, "repeats": 1, "warm_up": 2}}
    answer_run(settings)
    assert measured == [(32, 1), (32, 2)]
    answer_run({**settings, "runtime": {**settings["runtime"], "rerun": "times"}})
    assert measured == [(32, 1), (32, 2)] * 2


@pytest.mark.parametrize("kind", ["perplexity", "fidelity"])
def test_predictions_of_given_tokens_are_repeated_for_their_memory(
    tmp_path: Path, ran: list[str], capsys: Any, kind: str
) -> None:
    """Their rows have no times; peaks are measured anew, and another likelihood or divergence is named."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"word{(7 * k * k + 3 * k) % 61}" for k in range(120)), encoding="utf-8")
    options: dict[str, Any] = {
        "perplexity": {"_target_": "kvbench.tasks.perplexity.Perplexity", "path": str(file), "window": 96},
        "fidelity": {
            "_target_": "kvbench.tasks.fidelity.Fidelity",
            "text": str(file),
            "window": 80,
            "prefill": 64,
        },
    }[kind]
    plain = {**config(tmp_path), "dataset": {**options, "name": kind, "limit": 2}}
    first = answer_run(plain)
    rows = store_of(first).samples().rows
    name, row = next(iter(rows.items()))
    if kind == "perplexity":
        other: dict[str, Any] = {"nll": {key: 1.01 * value for key, value in row["nll"].items()}}
    else:
        other = {"fidelity": {**row["fidelity"], "kld": [value + 0.01 for value in row["fidelity"]["kld"]]}}
    rewrite(first, **{name: other})
    ran.clear()
    done = answer_run({**plain, "runtime": {**plain["runtime"], "rerun": "times"}})
    after = store_of(done).samples().rows
    assert len(ran) == 2 and done["status"] == "ok"
    assert {key: outputs(one) for key, one in after.items()} == {
        key: outputs({**one, **(other if key == name else {})}) for key, one in rows.items()
    }
    assert all(one[MEASURED].get("ttft_s") != 77.0 for one in after.values())
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 samples gave another answer than the stored one, which is kept" in said
    assert f"their times are those of the other: {name} hint:" in said
