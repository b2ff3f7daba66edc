"""The bench's commands about latency, capacity and goodput, on a CPU."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.bench import __main__ as command
from kvbench.bench import capacity, points, report
from kvbench.measure.meter import How, Meter
from kvbench.methods.load import load_method
from kvbench.models.load import byte_tokenizer
from kvbench.tasks.efficiency import Efficiency
from tests.results.test_replicates import process
from tests.zoo import fresh

TINY = ("--device", "cpu", "--model", "tiny", "--dtype", "float32")


def bench(capsys, *arguments: object) -> tuple[int, str, str]:
    status = command.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_latency_folds_files(tmp_path, capsys):
    files = [tmp_path / f"{number}.json" for number in (1, 2, 3)]
    for path, shift in zip(files, (0.0, 1e-4, -3e-4), strict=True):
        machine = {"machine": {"before": {}}, "command": "tpot --compile", "shuffle": 0}
        path.write_text(json.dumps({**process(shift), **machine}))
    status, out, _ = bench(capsys, "latency", *files, "--out", tmp_path / "all.json")
    assert status == 0 and "8,000" in out and "3.37*" in out
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["files"] == ["1.json", "2.json", "3.json"] and content["measured_by"] == "tpot --compile"
    assert content["processes"] == len(content["machines"]) == 3 and content["model"] == "llama"
    assert len(content["points"]) == 6 and len(content["fits"]) == 2 and "rows" not in content
    status, _, err = bench(capsys, "latency", tmp_path / "no.json", "--out", tmp_path / "all.json")
    assert status != 0 and "no.json cannot be read" in err


def test_processes_measure_the_same_points_in_orders_of_their_own(tmp_path, capsys, monkeypatch):
    """Each new process gets the same arguments, an order and a file; what they wrote is folded."""
    calls: list[list[str]] = []

    def run(arguments, check):
        calls.append(arguments[3:])
        name = arguments[arguments.index("--name", 4) + 1 :][-1]
        (tmp_path / f"{name}.json").write_text(json.dumps(process(1e-4 * len(calls))))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    given = ["tpot", "--device", "cpu", "--model", "tiny", "--processes", "2", "--shuffle", "7", "--out", str(tmp_path)]
    status, out, _ = bench(capsys, *given)
    assert status == 0 and "process 2 of 2" in out
    own = [["--shuffle", str(7 + n), "--out", str(tmp_path), "--name", f"tpot_tiny.{n + 1}"] for n in range(2)]
    assert calls == [[*given, "--processes", "1", *more] for more in own]
    assert json.loads((tmp_path / "tpot_tiny.json").read_text())["processes"] == 2
    status, _, err = bench(capsys, *given, "--grow")
    assert status != 0 and "--processes=2: needs fixed batch sizes" in err
    monkeypatch.setattr(subprocess, "run", lambda arguments, check: SimpleNamespace(returncode=-9))
    assert bench(capsys, *given)[0] == 1


def test_points_in_a_random_order():
    def shuffled(seed: int) -> list[tuple[str, int]]:
        rows: list[dict] = []
        methods = [(name, SimpleNamespace(detach=lambda model: None)) for name in ("fp16", "kivi")]
        measuring = points.PointBench.__new__(points.PointBench)  # without the model
        vars(measuring).update(
            args=SimpleNamespace(shuffle=seed, eager=False, graphs="never", compile=False, baselines=()),
            methods=methods, model=None, grid=Efficiency(prompts=(20, 30, 40), batches=(1,)),
            add=lambda start, measure, point: rows.append({**start, "prompt": point.prompt}),
            meter=lambda method, graphs: None,
        )  # fmt: skip
        measuring.measure_all()
        return [(row["setting"], row["prompt"]) for row in rows]

    first, again, other = shuffled(1), shuffled(1), shuffled(2)
    assert first == again != other and sorted(first) == sorted(other) and len(set(first)) == 6


def test_a_shuffled_measurement_records_the_machine_and_why_there_is_no_energy(tmp_path, capsys):
    status, _, _ = bench(
        capsys, "tpot", *TINY, "--fill", "random", "--contexts", 20, "--steps", 2, "--check", 0, "--no-stock",
        "--shuffle", 1, "--idle", 1, "--out", tmp_path, "--name", "one",
    )  # fmt: skip
    content = json.loads((tmp_path / "one.json").read_text())
    assert status == 0 and content["shuffle"] == 1 and set(content["machine"]) == {"before", "after", "idle_W"}
    assert content["machine"]["idle_W"] is None  # nothing to read, so nothing to wait for
    (row,) = content["rows"]
    assert row["energy"]["J_per_token"] is None and "NVML knows NVIDIA GPUs only" in row["energy"]["reason"]
    assert row["nominal_bits"] == {"key": 32, "value": 32}
    status, _, err = bench(capsys, "tpot", *TINY, "--grow", "--shuffle", 1)
    assert status != 0 and "--shuffle=1: needs fixed batch sizes" in err


def test_capacity_by_formula():
    assert capacity.fit_by_formula(1000, 300, 90, 100) == 6
    assert capacity.fit_by_formula(100, 300, 90, 100) == 0


def test_capacity_by_allocation(monkeypatch):
    """Caches are allocated until memory runs out, here after three, or until there are enough."""
    # a model of its own: the census counts tensors that the collector knows, not the frozen ones that files share
    meter = Meter(fresh(), byte_tokenizer(), load_method("kivi", residual=32), How(new_tokens=8, fill="random"))
    stored, room = capacity.stored_sequence, [0]

    def limited(meter, prompt):
        room[0] -= 1
        if room[0] < 0:
            raise MemoryError("no more")
        return stored(meter, prompt)

    monkeypatch.setattr(capacity, "stored_sequence", limited)
    weights = capacity.weight_bytes(meter.model)
    room[0] = 1 + 3
    row = capacity.sequences_that_fit(meter, 64, 10**7, 99)
    assert (row["status"], row["allocated"], row["ended"], row["weights"]) == ("ok", 3, "memory", weights)
    assert row["by_formula"] == max((10**7 - weights - row["workspace"]) // row["per_sequence"], 0)
    cache = stored(meter, 64)
    assert row["per_sequence"] == cache.bill().reserved.total and row["workspace"] > 0
    room[0] = 99
    assert capacity.sequences_that_fit(meter, 64, 10**7, 2)["ended"] == "bound"
    room[0] = 0
    row = capacity.sequences_that_fit(meter, 64, 10**7, 2)
    assert (row["status"], row["allocated"]) == ("oom", 0) and "by_formula" not in row
    assert capacity.capacity_cells({**row, "setting": "kivi"})[-2:] == [0, "oom"]


def test_capacity_within_a_limit_of_memory(tmp_path, capsys):
    common = (
        "capacity",
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--contexts",
        64,
        "--out",
        tmp_path,
    )
    status, _, err = bench(capsys, *common)
    assert status != 0 and "--memory-limit-gb" in err and "is required on a cpu device" in err
    status, out, _ = bench(
        capsys, *common, "--memory-limit-gb", 1, "--max-sequences", 2, "--settings", "kivi", "--name", "c"
    )
    content = json.loads((tmp_path / "c.json").read_text())
    (row,) = content["rows"]
    assert status == 0 and (row["allocated"], row["ended"]) == (2, "bound") and row["by_formula"] > 2
    assert "kivi" in out and content["memory_limit_gb"] == 1


def test_goodput_of_recorded_steps(tmp_path, capsys):
    def point(batch: int, ttft: float | None, tpot: float) -> dict:
        return {
            "setting": "fp16",
            "prompt": 4096,
            "batch": batch,
            "status": "ok",
            "ttft_s": ttft,
            "tpot_s": {"median": tpot},
        }

    rows = [point(2, 1.0, 0.01), point(8, 4.0, 0.02), {"setting": "fp16", "prompt": 4096, "batch": 16, "status": "oom"}]
    path, out = tmp_path / "memory.json", tmp_path / "goodput.json"
    path.write_text(json.dumps({"model": "m", "device": "d", "rows": rows}))
    status, printed, _ = bench(
        capsys,
        "goodput",
        path,
        "--rates",
        0.01,
        100,
        "--ttft-ms",
        600,
        "--requests",
        20,
        "--output-tokens",
        3,
        "--out",
        out,
    )
    assert status == 0 and "Simulated, not measured" in printed and "(simulated)" in printed
    content = json.loads(out.read_text())
    slow, fast = content["rows"]
    assert content["simulated"] and slow["simulated"] and (slow["most"], slow["prefill_s"]) == (8, 0.5)
    assert slow["ttft_s"] == pytest.approx(0.5) and slow["tpot_s"] == pytest.approx(0.01) and slow["good"] > 0.9
    assert fast["good"] == pytest.approx(1 / 20)  # all come at once, and only the first is read within the limit
    assert bench(capsys, "goodput", path, "--out", out)[0] != 0
    path.write_text(json.dumps({"rows": [point(2, None, 0.01)]}))
    status, _, err = bench(capsys, "goodput", path, "--ttft-ms", 1, "--out", out)
    assert status != 0 and "has no point with a TTFT" in err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tpot_s": {"median": float("nan")}}, "nan s a step"),
        ({"ttft_s": 0.0}, "0.0 s of prefill"),
        ({"graphs": "never"}, "two points with batch 1"),
    ],
)
def test_goodput_needs_one_finite_time_per_batch_size(tmp_path, capsys, more, reason):
    row = {"setting": "fp16", "status": "ok", "prompt": 16, "batch": 1, "ttft_s": 0.1, "tpot_s": {"median": 0.01}}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"rows": [row, {**row, **more}]}))
    status, _, err = bench(capsys, "goodput", path, "--ttft-ms", 500, "--out", tmp_path / "goodput.json")
    assert status != 0 and reason in err and "batch.json" in err


def test_goodput_names_a_file_that_cannot_be_written(tmp_path, capsys):
    row = {"setting": "fp16", "status": "ok", "prompt": 16, "batch": 1, "ttft_s": 0.1, "tpot_s": {"median": 0.01}}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"rows": [row]}))
    status, _, err = bench(capsys, "goodput", path, "--ttft-ms", 500, "--out", path / "goodput.json")
    assert status != 0 and "cannot be written" in err and "--out FILE" in err


def test_a_slip_in_a_setting_is_told_before_the_missing_gpu(capsys):
    assert command.main(["tpot", "--settings", "kivi:int9"]) == 2
    said = capsys.readouterr().err
    assert "int9" in said and "CUDA" not in said


@pytest.mark.parametrize(
    ("out", "name", "path"),
    [
        ("a/tp.json", None, "a/tp.json"),
        ("a", None, "a/tpot.json"),
        ("a", "tp", "a/tp.json"),
        (None, None, "results/cpu/tpot.json"),
    ],
)
def test_out_is_a_folder_or_a_json_file_of_every_command(out, name, path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = argparse.Namespace(out=out and Path(out), name=name)
    assert report.json_file(args, "tpot") == Path(path)
    del args.name  # latency and goodput have none
    assert name or report.json_file(args, "tpot") == Path(path)
    with pytest.raises(SystemExit):
        command.main(["tpot", "--out", "a/tp.json", "--name", "b"])
    assert "--out a/tp.json already names the file, so --name b cannot" in capsys.readouterr().err
