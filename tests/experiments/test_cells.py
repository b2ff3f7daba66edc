"""The papers' cells of time and memory: their kinds, the jobs that fill them, the worker on a small model, files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.cells import jobs as jobs_module
from experiments.cells import keep, states, worker
from experiments.cells.__main__ import cells_parser, main
from experiments.cells.jobs import Job, in_order
from experiments.fold import forced, points
from experiments.registry import items
from kvbench.bench.__main__ import bench_parser
from kvbench.models import shared

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the configuration of a small model."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_shelf", None)


def job(model: str, setting: str, batch: int = 1, seconds: float = 1.0, **more: Any) -> Job:
    at = ("--contexts", "64", "--batches", str(batch), "--new-tokens", "4", "--repeats", "1")
    command = ("memory", "--model", model, "--settings", setting, *at)
    given = {"cells": 1, "ends": (setting, batch), "calibrate": (), **more}
    return Job(("cocktail/figure4",), model, "efficiency", command, seconds=seconds, **given)


def speculation(model: str, *cases: str) -> Job:
    command = ("speculation", "--points", f"{model}:1:64", "--cases", *cases, "--gammas", "2", "--side-gammas", "2")
    command += ("--blocks", "1", "--tokens", "4", "--no-auto", "--no-compile")
    return Job(("quantspec/table4",), model, "speculation", command, (), 2, 1.0)


def plain(*jobs: Job) -> list[dict[str, Any]]:
    """Return jobs as they are read from their file."""
    return json.loads(json.dumps([one.as_dict() for one in jobs]))  # type: ignore[no-any-return]


def test_every_cell_has_a_kind_and_the_papers_scores_are_not_ours_to_fill() -> None:
    for item in states.timed_items():
        counts = Counter(state.kind for state in states.cell_states(item))
        assert set(counts) <= set(states.KINDS)
        assert counts[states.NUMBER] + counts[states.FULL] + counts[states.MISSING] > 0
    table4 = Counter(state.kind for state in states.cell_states(items()["quantspec/table4"]))
    # 8 of 16 places of a model are in the paper's table; of 4 columns acceptance and the speed with it need weights
    assert (table4[states.ABSENT], table4[states.TRAINED], table4.total()) == (128, 64, 256)
    figure5 = Counter(state.kind for state in states.cell_states(items()["quantspec/figure5"]))
    assert figure5[states.FORMULA] == 24
    sums = states.counts_table(states.timed_items())[-1]
    assert int(sums[1]) == sum(map(int, sums[2:]))


def test_a_point_out_of_memory_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    rows = [{"setting": "fp16", "prompt": 3500, "batch": batch, "status": status} for batch, status in ((5, "oom"),)]
    content = {"model": "llama2-7b", "device": "card", "memory_limit_gb": 44.7, "rows": rows}
    (folder / "a.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(states, "FOLDERS", (folder,))
    kinds = [state for state in states.cell_states(items()["cocktail/figure6"]) if state.kind == states.FULL]
    assert {(state.model, state.row) for state in kinds} == {("Llama2-7B", "FP16")}
    assert len(kinds) == 10  # batches from 5 on


def test_speculation_out_of_memory_is_an_answer_too(nothing_measured: None, tmp_path: Path) -> None:
    def wanted() -> set[str]:
        made = [one.command for one in jobs_module.speculation_jobs() if "llama2-7b:1:32768" in one.command]
        return {case for command in made for case in command[command.index("--cases") + 1 : command.index("--gammas")]}

    before = wanted()
    assert {"quantspec", "snapkv"} < before
    row = {"model": "llama2-7b", "batch": 1, "context": 32768, "case": "quantspec", "status": "oom"}
    (tmp_path / "a.json").write_text(json.dumps({"device": "card", "at": 0.9, "rows": [row]}), encoding="utf-8")
    forced.forced_speeds.cache_clear()
    kinds = [state for state in states.cell_states(items()["quantspec/table4"]) if state.kind == states.FULL]
    assert {state.column for state in kinds} == {
        f"{data} 32k: speed-up, acceptance forced" for data in ("multi_lexsum", "infinitebench_sum")
    }
    assert before - wanted() == {"quantspec"}


@pytest.fixture
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(forced, "FOLDER", tmp_path)
    row = Namespace(expected_tpot_s=0.01, ttft_s=1.0, decode_peak_bytes=2**30, prefill_peak_bytes=2**30)
    monkeypatch.setattr(jobs_module, "predicted", lambda *point: row)


@pytest.mark.slow  # it predicts the time of every job
def test_jobs_fill_all_that_is_missing_and_the_bench_takes_their_commands(nothing_measured: None) -> None:
    made = jobs_module.all_jobs()
    missing = sum(state.kind == states.MISSING for item in states.timed_items() for state in states.cell_states(item))
    groups = 6  # of LogQuant's Figure 7: they follow from its columns
    assert sum(one.cells for one in made) == missing - groups
    assert len({one.command for one in made}) == len(made)
    for one in made[::7]:
        args = bench_parser(one.command[0]).parse_args(list(one.command))
        assert one.data == "speculation" or (args.memory_limit_gb in (None, 44.7, 48.0) and len(args.batches) == 1)
    quantized = [one for one in made if "kvquant" in one.command]
    assert quantized and all("--random" in one.calibrate for one in quantized)


def test_where_memory_should_end_the_smallest_batch_stands_for_the_larger_ones(
    nothing_measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(model: str, setting: str, prompt: int, batch: int, new: int) -> Namespace:
        peak = (10 + 5 * batch) * 2**30  # 44.7 GiB end at 6 sequences
        return Namespace(expected_tpot_s=0.01, ttft_s=1.0, decode_peak_bytes=peak, prefill_peak_bytes=0)

    monkeypatch.setattr(jobs_module, "predicted", row)
    mine = [one for one in jobs_module.point_jobs() if one.model == "llama2-13b" and "fp16" in one.command]
    assert [(one.ends[1], one.cells) for one in mine if one.ends] == [
        (1, 5), (2, 1), (4, 1), (5, 1), (10, 9), (12, 0), (16, 0), (18, 0), (28, 0), (32, 0), (40, 0), (48, 0), (96, 0)
    ]  # fmt: skip


def test_the_best_value_comes_first_and_models_are_loaded_seldom() -> None:
    jobs = [job("a", "x", cells=9), job("b", "y", cells=1), job("a", "z", cells=3), job("b", "w", cells=2)]
    assert [one.model for one in in_order(jobs)] == ["a", "a", "b", "b"]
    assert [one.cells for one in in_order(jobs)] == [9, 3, 2, 1]
    halves = [worker.part_of(plain(*in_order(jobs)), number, 2) for number in (0, 1)]
    assert [{one["model"] for one in half} for half in halves] == [{"a"}, {"b"}]


def test_jobs_become_rows_and_a_second_worker_does_what_is_left(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    from kvbench.decoding import compiled

    whole = compiled.load_model
    monkeypatch.setattr(compiled, "load_model", lambda *given: loads.append(given[1].compile) or whole(*given))
    first, second, cases = job(model, "fp16"), job(model, "kivi:int4", 2), speculation(model, "plain", "quantspec")
    broken = job(model, "kivi:int4:residual=-1")
    logs = tmp_path / "logs"
    one = worker.Worker(logs, "part1", 1000, "cpu")
    assert one.measure(plain(first, broken, second)) == 3 and loads == [True]
    lines = worker.logged(logs)
    assert [line["status"] for line in lines] == ["ok", "failed", "ok"] and "residual" in lines[1]["message"]
    again = worker.Worker(logs, "part2", 1000, "cpu")
    assert again.measure(plain(first, second, cases)) == 1  # what failed would be tried again
    with (logs / "part2.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"job": {"mod')  # a process that was killed
    assert worker.Worker(logs, "part2", 1000, "cpu").measure(plain(broken)) == 1  # begins a new line
    lines = worker.logged(logs)
    assert [line["status"] for line in lines] == ["ok", "failed", "ok", "ok", "failed"]

    (timed, forced_file) = keep.keep(lines, tmp_path)
    content = json.loads(timed.read_text())
    assert timed.name.startswith("timed_small") and timed.parent == tmp_path / "results" / "h200" / "papers"
    assert [(row["setting"], row["batch"]) for row in content["rows"]] == [("fp16", 1), ("kivi:int4", 2)]
    assert content["model"] == model and content["command"] == keep.COMMAND
    assert "/tmp" not in content["command"] and "message" not in content
    rows = {row["case"]: row for row in json.loads(forced_file.read_text())["rows"]}
    assert rows["plain"]["ms"] > 0 and rows["quantspec"]["measured"][0]["acceptance"] == 0.9
    assert keep.keep(lines[:1], tmp_path) == [timed]  # a later log replaces its rows, and leaves the others
    assert len(json.loads(timed.read_text())["rows"]) == 2
    # and the folds read them
    points.stored_points.cache_clear()
    source = points.stored_points((timed.parent,))
    assert {key[1:4] for key in source} == {
        (points.canonical("fp16"), 64, 1), (points.canonical("kivi:int4"), 64, 2)
    }  # fmt: skip
    forced.forced_speeds.cache_clear()
    assert {key[1:] for key in forced.forced_speeds(forced_file.parent)} == {("plain", 64, 1), ("quantspec", 64, 1)}


def test_lack_of_memory_is_recorded_and_larger_batches_are_not_tried(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.measure.meter import Meter

    whole = Meter._measured

    def measured(self: Meter, prompt: int, batch: int) -> Any:
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(self, prompt, batch)

    monkeypatch.setattr(Meter, "_measured", measured)
    same = {"ends": ("fp16", 1)}
    jobs = plain(job(model, "fp16", 1, **same), job(model, "fp16", 2), job(model, "fp16", 4), job(model, "kivi:int4"))
    one = worker.Worker(tmp_path, "part1", 1000, "cpu")
    assert one.measure(jobs) == 3
    lines = worker.logged(tmp_path)
    assert [(line["status"], line["job"]["ends"]) for line in lines] == [
        ("ok", ["fp16", 1]), ("oom", ["fp16", 2]), ("ok", ["kivi:int4", 1])
    ]  # fmt: skip
    assert worker.Worker(tmp_path, "part2", 1000, "cpu").measure(jobs) == 0
    (timed,) = keep.keep(lines, tmp_path)
    assert [row["status"] for row in json.loads(timed.read_text())["rows"]] == ["ok", "oom", "ok"]


@pytest.mark.parametrize("phase", ["decode", "end"])
def test_memory_that_ends_after_the_prompts_is_no_answer(
    phase: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again by the next worker, from this code's logs and from older ones, and not kept."""
    from kvbench.measure.meter import Meter

    jobs = plain(job(model, "fp16", 2, ends=("fp16", 2)), job(model, "fp16", 4, ends=("fp16", 4)))
    with monkeypatch.context() as patch:

        def measured(self: Meter, prompt: int, batch: int) -> Any:
            self._watch = Namespace(at=phase)  # type: ignore[assignment]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        patch.setattr(Meter, "_measured", measured)
        one = worker.Worker(tmp_path, "part1", 1000, "cpu")
        assert one.measure(jobs) == 2 and not one.ended
    log = tmp_path / "part1.jsonl"
    assert [line["content"]["rows"][0]["phase"] for line in worker.logged(tmp_path)] == [phase] * 2
    log.write_text(log.read_text().replace('"status": "failed"', '"status": "oom"'))
    lines = worker.logged(tmp_path)
    assert [line["status"] for line in lines] == ["failed"] * 2 and not keep.keep(lines, tmp_path)
    again = worker.Worker(tmp_path, "part1", 1000, "cpu")
    assert not again.done and not again.ended and again.measure(jobs) == 2


def test_only_what_fits_into_the_time_is_begun(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = worker.Worker(tmp_path, "part1", 30, "cpu")
    assert one.measure(plain(job(model, "kivi:int4", seconds=60.0), job(model, "fp16"))) == 1
    assert "are left" in capsys.readouterr().err
    assert [line["job"]["command"][4] for line in worker.logged(tmp_path)] == ["fp16"]


def test_a_job_that_outlasts_the_deadline_is_given_up_and_logged(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker.Worker(tmp_path, "part1", 1000, "cpu")

    def late(*given: Any) -> None:
        raise worker.OutOfTime("the deadline has passed")

    monkeypatch.setattr("kvbench.bench.speculation_bench.SpeculationBench.rounds", late)
    assert one.measure(plain(speculation(model, "plain", "quantspec", "kv"), job(model, "fp16"))) == 1
    (line,) = worker.logged(tmp_path)
    assert line["status"] == "failed"
    assert [row["status"] for row in line["content"]["rows"]] == ["ok", "unfinished"]


def test_lack_of_memory_before_a_measurement_is_no_answer(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row could say so: another worker that held the memory may have ended by the next time."""

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(worker, "first_prefill", full)
    one = worker.Worker(tmp_path, "part1", 1000, "cpu")
    assert one.measure(plain(job(model, "fp16"))) == 1
    (line,) = worker.logged(tmp_path)
    assert line["status"] == "failed" and "out of memory" in line["message"] and not one.ended


def test_the_command_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(plain(job(model, "fp16"))), encoding="utf-8")
    given = ["measure", str(file), "--out", str(tmp_path / "logs"), "--seconds", "500", "--device", "cpu"]
    assert main(given) == 0 and len(worker.logged(tmp_path / "logs")) == 1
    assert main([*given[:1], str(tmp_path / "none"), *given[2:]]) == 2
    assert "there is no such file" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([*given[:-1], "cuda"]) == 2 and len(worker.logged(tmp_path / "logs")) == 1
        assert "runtime.device=cuda" in capsys.readouterr().err
    file.write_text('[{"item"', encoding="utf-8")
    assert main(given) == 2 and "is damaged" in capsys.readouterr().err
    (tmp_path / "logs" / "samples.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    assert main(["keep", str(tmp_path / "logs")]) == 2 and "is no log of jobs" in capsys.readouterr().err
    assert main(["keep", str(tmp_path / "none")]) == 2
    assert cells_parser().parse_args([*given, "--part", "2/3"]).part == (1, 3)
    for wrong in ("nan", "0"):
        with pytest.raises(SystemExit):
            cells_parser().parse_args([*given, "--seconds", wrong])
    for wrong in ("3/2", "0/2", "x"):
        with pytest.raises(SystemExit):
            cells_parser().parse_args([*given, "--part", wrong])
