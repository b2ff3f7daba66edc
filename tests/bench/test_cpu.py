"""``bench cpu``: turns, ratios, gates and the table; the rows themselves come from other processes."""

import argparse
import json
import sys

import pytest
import torch

from kvbench.bench import cpu

ROW = {
    "name": "attention tiny 32k int4", "kernel": "cpu-avx2", "threads": 1, "gate": 2.0, "ratio": 1.818,
    "fp16_ms": 4.0, "fp16_in": "bfloat16", "ms": 2.2, "in": "float32", "all_ms": {},
    "right": True, "check": "error 1e-3",
}  # fmt: skip


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs the command; its other processes print a row, with the limit of the instruction set as the check."""

    def run(**changes):
        script = tmp_path / "python"
        row = json.dumps(ROW | changes).replace("error 1e-3", "$ATEN_CPU_CAPABILITY $ONEDNN_MAX_CPU_ISA")
        script.write_text(f"#!/bin/sh\ncat <<END\n{row}\nEND\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        parser = argparse.ArgumentParser()
        cpu.add_cpu_options(parser)
        args = parser.parse_args(["--out", str(tmp_path / "out")])
        args.argv = ["cpu"]
        status = cpu.measure_cpu(args)
        folder = tmp_path / "out"
        return status, json.loads((folder / "cpu.json").read_text()), (folder / "cpu.md").read_text()

    return run


def test_each_set_is_measured_under_its_limits_and_avx2_must_reach_a_share(measure, capsys):
    status, recorded, table = measure()
    assert status == 0
    assert [row["gate"] for row in recorded["rows"]] == [2.0, pytest.approx(1.6)]
    assert [row["check"].strip() for row in recorded["rows"]] == ["", "avx2 AVX2"]
    best, avx2 = table.splitlines()[-2:]
    assert "| **1.82x** | 2.00x |" in best and "| 1.82x | 1.60x |" in avx2
    assert "4.000 (bfloat16) | 2.200 (float32)" in best
    assert torch.__version__ in table and "python -m kvbench.bench cpu" in table
    assert "**1.82x**" in capsys.readouterr().out


def test_a_wrong_value_is_the_exit_status(measure):
    status, _, table = measure(right=False)
    assert status == 1 and table.count("**WRONG**") == 2


def test_the_faster_arithmetic_of_either_counts(monkeypatch):
    times = {("fp16", "bfloat16"): 8.0, ("fp16", "float32"): 6.0, ("kivi", "bfloat16"): 2.0, ("kivi", "float32"): 3.0}
    row = cpu.ratios("step tiny 32k kivi:int4", 2, times, "kivi", True, "")
    assert (row["fp16_in"], row["in"], row["ratio"], row["gate"]) == ("float32", "bfloat16", 3.0, 1.3)


def test_contenders_take_turns_until_time_is_up(monkeypatch):
    """The first turn of quick ones does not count; slow ones are not run twice for it."""
    now, ran = [0.0], []
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)

    def contender(name, *seconds):
        left = list(seconds)

        def run():
            ran.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return run

    args = argparse.Namespace(runs=3, seconds=100.0)
    quick = {"a": contender("a", 0.01, 0.5, 0.2, 0.3), "b": contender("b", 0.4)}
    times = cpu.least(quick, args, threads=2)
    assert ran == ["a", "b"] * 4 and times == pytest.approx({"a": 200.0, "b": 400.0})
    ran.clear()
    args.seconds = 5.0
    times = cpu.least({"slow": contender("slow", 4.0, 6.0)}, args, threads=2)
    assert ran == ["slow"] * 2 and times == pytest.approx({"slow": 4000.0})


def test_rows_are_chosen_by_a_part_of_their_name():
    args = argparse.Namespace(only="8k")
    assert cpu.chosen(args, "attention") == []
    assert [name.split()[3] for name in cpu.chosen(args, "step")] == ["8k"] * 4
