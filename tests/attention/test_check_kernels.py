"""The check of the decode kernels, on a CPU with a kernel in plain torch: its configurations and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.attention import check_cases, check_kernels, synthetic
from kvbench.attention.check_cases import INT4, MIX, Case, channel, one_packed_segment, token, windows
from kvbench.attention.phases import Format
from tests.attention import interpreter

SMALL = Case("small", "tiny", one_packed_segment(channel(4, 32), token(4, 64)), (300, 200), (37, 90), 2)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents on a CPU; nothing waits for a GPU."""
    monkeypatch.setattr(check_cases, "DEVICE", "cpu")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def oracle(wrong: float = 0.0, reason: str | None = None) -> Any:
    """A kernel in plain torch whose results are off by a share."""

    def attend(query: torch.Tensor, work: Any, scaling: float) -> torch.Tensor:
        return synthetic.dequantized_attention(query, work, scaling) * (1 + wrong)

    return SimpleNamespace(attend=attend, refuses=lambda query, work: reason)


def test_a_row_is_divided_between_tiers_and_window() -> None:
    case = Case("x", "7b", MIX, (1491,), (37, 90))
    # of 1454 tokens 60 and 30 per cent, in whole tiles; the rest is exact; 53 more values than keys are
    assert case.lengths(1491) == ([768, 384, 339], [768, 331, 392])
    full = Case("x", "7b", INT4, (1491,), (37, 90))
    assert full.lengths(1491) == ([1454, 37], [1401, 90])
    assert Case("x", "7b", (), (50,)).lengths(50) == ([50], [50])
    assert case.shortened().context == (1491,)
    assert Case("x", "7b", INT4, (33000, 33000, 7)).shortened().context == (1500, 1501)


def test_groups_of_a_window_are_the_fewest_of_64_tokens_or_less() -> None:
    assert windows(2, 42) == Format("affine", 2, "channel", 42, 42)
    assert windows(4, 131) == Format("affine", 4, "channel", 44, 131)
    assert windows(4, 64).group == 64 and windows(4, 65).group == 33
    assert channel(4, 32) == Format("affine", 4, "channel", 32) and token(8, 64, "x") == Format("x", 8, "token", 64)
    assert one_packed_segment(channel(4, 32), token(4, 64)) == ((channel(4, 32), token(4, 64), 1.0),)


def test_the_cases_cover_every_format_and_have_names_of_their_own() -> None:
    found = check_cases.cases()
    assert len({case.name for case in found}) == len(found)
    right, timed = check_cases.correctness(), check_cases.timed()
    assert found == [*right, *timed]
    assert not any(case.timed for case in right) and all(case.timed for case in timed)
    forms = {form for case in right for key, value, _ in case.tiers for form in (key, value)}
    assert {(form.kind, form.bits) for form in forms} == {
        *(("affine", bits) for bits in (2, 4, 8)),
        *(("atom", bits) for bits in (2, 4)),
        ("hierarchical", 8),
        *(("cross", bits) for bits in (2, 3, 4, 8)),
        *(("offset", bits) for bits in (4, 8)),
        *(("float", bits) for bits in (4, 8)),
        ("folded", 4),
        ("iq4_nl", 4),
        *(("octave", bits) for bits in (3, 4)),
    } | {(kind, bits) for kind, bits in {(f.kind, f.bits) for f in forms} if kind.startswith("levels")}
    assert {form.scale for form in forms} == {"", "fp16", "fp32", "e4m3"}
    assert {form.group for form in forms if not form.window} == {16, 32, 64, 128}
    assert {case.queries for case in right} == {1, 5, 9} and {case.dtype for case in right} == {
        torch.float16,
        torch.bfloat16,
    }
    (case,) = (case for case in timed if case.name == "int8 7b B1 128k q5")
    assert (case.context, case.queries, case.tiers) == ((128 * 1024 + 9,), 5, check_cases.INT8)
    (case,) = (case for case in timed if case.name == "int4 8b B16 32k")
    assert case.context == (32 * 1024 + 9,) * 16


def test_a_case_is_a_layer_of_its_lengths_and_a_query_of_its_shape(cpu: None) -> None:
    work, query = SMALL.work(3), SMALL.query()
    assert (work.heads, work.key_dim, work.value_dim) == (2, 64, 64)
    assert [sum(line[2] for line in row) for row in work.counts] == [300, 200]
    assert work.signature()[0] == (channel(4, 32), token(4, 64)) and work.signature()[-1][0].kind == "full"
    assert query.shape == (2, 6, 2, 64) and query.dtype == torch.float16
    assert float(query.float().std()) == pytest.approx(1.5, rel=0.1) and torch.equal(query, SMALL.query())
    words = [SMALL.work(seed).phases[0][0].words[0] for seed in (3, 3, 4)]
    assert torch.equal(words[0], words[1]) and not torch.equal(words[0], words[2])


def test_bytes_are_codes_parameters_and_exact_tokens(cpu: None) -> None:
    # 263 packed keys and 210 values in 2 heads of row 0, 163 and 110 of row 1: 4 bits, and 2 fp16 numbers a group
    keys, values = 263 + 163, 210 + 110
    packed = 2 * 64 * (keys * (4 + 1) + values * (4 + 0.5)) / 8
    exact = 2 * 64 * 2 * (2 * 37 + 2 * 90)
    assert check_kernels.nbytes(SMALL.work(0)) == int(packed + exact)


def test_a_line_says_whether_a_kernel_is_right(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    line = check_kernels.measure_case(SMALL, "mine", oracle())
    assert line == {"case": "small", "kernel": "mine", "error": 0.0, "ok": True}
    assert check_kernels.report_line(line).split() == ["small", "mine", "0.00000"]
    off = check_kernels.measure_case(SMALL, "mine", oracle(4e-3))
    assert not off["ok"] and "WRONG" in check_kernels.report_line(off)
    bf16 = replace(SMALL, dtype=torch.bfloat16)
    assert check_kernels.measure_case(bf16, "mine", oracle(4e-3))["ok"]  # 8 bits of mantissa
    assert not check_kernels.measure_case(bf16, "mine", oracle(5e-3))["ok"]
    refused = check_kernels.measure_case(SMALL, "mine", oracle(reason="too wide"))
    assert refused == {"case": "small", "kernel": "mine", "refused": "too wide"}
    assert check_kernels.report_line(refused).split(maxsplit=2) == ["small", "mine", "refused: too wide"]
    assert check_kernels.measure_case(SMALL, "mine", SimpleNamespace(attend=oracle().attend))["ok"]
    assert check_kernels.report_line({"case": "small", "kernel": "mine", "failed": "why"}).endswith("FAILED: why")


def test_a_timed_case_reads_more_than_the_cache_holds(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    size = check_kernels.nbytes(SMALL.work(0))
    monkeypatch.setattr(check_kernels, "ROTATED", 3 * size + 1)
    asked: list[Any] = []
    monkeypatch.setattr(check_kernels, "microseconds", lambda *given: asked.append(given) or 12.345)
    line = check_kernels.measure_case(replace(SMALL, timed=True), "mine", oracle())
    assert line["us"] in (12.34, 12.35)
    assert line["gbs"] == round(size / line["us"] / 1e3) and line["ok"]
    ((_, query, works, scaling),) = asked
    assert len(works) == 4 and scaling == 0.125 and query.shape == (2, 6, 2, 64)
    assert len({work.phases[0][0].words[0].flatten()[0].item() for work in works}) > 1
    assert check_kernels.report_line({**line, "us": 12.5, "gbs": 7}).endswith(" 12.50 us      7 GB/s")


def test_launch_parameters_are_tuned_by_width() -> None:
    interpreter.require()
    from kvbench.attention.triton import decode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "TABLE", dict(decode.TABLE))
        before = dict(decode.TABLE)
        check_kernels.tune("")
        assert before == decode.TABLE
        check_kernels.tune("2:warps=8;4:stages=9,fused=3")
        assert (decode.TABLE[2].warps, decode.TABLE[4].stages, decode.TABLE[4].fused) == (8, 9, 3)
        assert decode.TABLE[4].warps == before[4].warps and decode.TABLE[8] == before[8]
        check_kernels.tune("max_rows=32")
        assert {line.max_rows for line in decode.TABLE.values()} == {32}


def test_kernels_that_cannot_be_imported_are_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(check_kernels.KERNELS, "cuda", "kvbench.attention.nothing")
    monkeypatch.setitem(check_kernels.KERNELS, "triton", "kvbench.attention.synthetic")
    assert check_kernels.kernels("cuda,triton") == {"triton": synthetic}
    assert capsys.readouterr().out == "# cuda: No module named 'kvbench.attention.nothing'\n"


def test_a_worker_goes_on_after_a_failure_and_ends_with_a_broken_gpu(
    cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"good": oracle(), "bad": SimpleNamespace(attend=None)}
    monkeypatch.setattr(check_kernels, "kernels", lambda names: modules if names == "good,bad,none" else {})
    todo, log = [(SMALL, name) for name in ("good", "bad", "none", "good")], tmp_path / "log"
    assert check_kernels.measure_cases(todo, 1, log, "good,bad,none") == 0
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert [(line["kernel"], [key for key in ("ok", "failed", "refused") if key in line]) for line in lines] == [
        ("bad", ["failed"]),
        ("none", ["refused"]),
        ("good", ["ok"]),
    ]
    assert lines[0]["failed"].startswith("TypeError: 'NoneType'") and lines[1]["refused"] == "cannot be imported"

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    assert check_kernels.measure_cases(todo, 0, log, "good,bad,none") == 1
    assert len(log.read_text().splitlines()) == 4  # the line of the configuration that broke it is kept


@pytest.mark.parametrize("last", [True, False])
def test_the_report_goes_on_where_a_worker_died(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The first worker dies after a line, the second within its first configuration, the third ends."""
    cases = [replace(SMALL, name=name) for name in ("one", "two", "other", "three")]
    calls: list[tuple[int, Sequence[str]]] = []

    def work(command: Sequence[str], check: bool) -> Any:
        done, log = int(command[command.index("--done") + 1]), Path(command[command.index("--log") + 1])
        calls.append((done, command))
        lines = [
            {"case": case.name, "kernel": "triton", "error": 0.0, "ok": last or case.name != "three"}
            for case in [case for case in cases if case.name != "other"][done : {0: 1, 1: 1, 2: 3}[done]]
        ]
        with log.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        return SimpleNamespace(returncode={0: 1, 1: -6, 2: 0}[done])

    monkeypatch.setattr(check_kernels, "cases", lambda: cases)
    monkeypatch.setattr(subprocess, "run", work)
    monkeypatch.setattr(subprocess, "Popen", lambda command: SimpleNamespace(wait=lambda: calls.append((-1, command))))
    out = tmp_path / "deep" / "report.json"
    options = ["--only", "^(one|two|three)$", "--kernels", "triton", "--workers", "2", "--tune", "warps=1"]
    monkeypatch.setattr(sys, "argv", ["x", *options, "--out", str(out)])
    assert check_kernels.main() == 1
    lines = json.loads(out.read_text())["lines"]
    assert [line["case"] for line in lines] == ["one", "two", "three"]
    assert lines[1]["failed"] == "process ended with -6" and lines[2]["ok"] is last
    assert [done for done, _ in calls] == [-1, -1, 0, 1, 2]
    assert [command[-1] for done, command in calls[:2]] == ["0/2", "1/2"]
    assert all("^(one|two|three)$" in command and "warps=1" in command for _, command in calls)
    assert f"# 3 lines, {2 - last} wrong or failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "captured", "replay_s", "timed"),
    [(3, 6, 0.0, 50), (1, 8, 1.0, 8), (10, 10, 1 / 64, 10)],
    ids=["at most 50", "at least 8", "for 0.15 s"],
)
def test_a_time_is_the_median_of_replays_that_call_each_layer_equally_often(
    layers: int, captured: int, replay_s: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 8 calls are captured at once, so that their launches cost nothing."""
    replays: list[int] = []
    called: list[Any] = []

    class Graph:
        def replay(self) -> None:
            replays.append(len(called))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, end: Any) -> float:
            return float(len(replays) - 3)  # ms: 1, 2, 3, ... after three to warm up

    patched = {"CUDAGraph": Graph, "Event": Event, "graph": lambda graph: nullcontext(), "synchronize": lambda: None}
    for name, value in patched.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(check_kernels.time, "perf_counter", lambda: replay_s * max(len(replays) - 3, 0))
    works: list[Any] = [object() for _ in range(layers)]
    found = check_kernels.microseconds(lambda *given: called.append(given), "query", works, 0.5)  # type: ignore[arg-type]
    assert called == [("query", works[i % layers], 0.5) for i in range(captured)]
    assert len(replays) == 3 + timed and found == (timed // 2 + 1) * 1000 / captured
