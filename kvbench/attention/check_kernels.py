"""Correctness and speed of the decode kernels on a GPU: ``python -m kvbench.attention.check_kernels``.

Prints one line for each configuration and kernel: the relative error against fp32 attention over the dequantized tokens
and, for timed configurations, the microseconds of the whole operation, including the merge of partial results. The time
is the median over replays of a CUDA graph whose calls read in turn more bytes than the L2 cache holds. A configuration
that fails gets a line as well. An error that corrupts the CUDA context ends the worker process, and a new one continues
with the next configuration. Triton's kernels are compiled in parallel beforehand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.check_cases import Case, cases
from kvbench.attention.phases import Work
from kvbench.attention.synthetic import dequantized_attention, relative_error

TOLERANCE = 3e-3
#: bytes that the timed calls read in turn: more than twice any L2 cache
ROTATED = 160 * 2**20
KERNELS = {"triton": "kvbench.attention.triton.decode", "cuda": "kvbench.attention.cuda.decode"}

Attend = Callable[[Tensor, Work, float], Tensor]


def kernels(names: str) -> dict[str, Any]:
    """Import kernels (keys of :data:`KERNELS`, separated by commas), and print a line about each that is missing."""
    modules = {}
    for name in names.split(","):
        try:
            modules[name] = importlib.import_module(KERNELS[name])
        except ImportError as missing:
            print(f"# {name}: {missing}", flush=True)
    return modules


def tune(text: str) -> None:
    """Set launch parameters of the Triton kernel in this process, from the text of the option ``--tune``.

    Args:
        text: assignments to fields of :class:`kvbench.attention.triton.decode.Tuning`. ``"warps=1,stages=4"`` applies
            to all code widths, ``"2:warps=2;4:stages=4"`` to 2-bit and to 4-bit codes.
    """
    from kvbench.attention.triton import decode as triton_tuning

    for part in filter(None, text.split(";")):
        only, _, choices = part.rpartition(":")
        table = triton_tuning.changed(**{k: int(v) for k, v in (pair.split("=") for pair in choices.split(","))})
        triton_tuning.TABLE.update({bits: line for bits, line in table.items() if only in ("", str(bits))})


def nbytes(work: Work) -> int:
    """Return how many bytes of cached keys and values a kernel has to read for one step, to compute its bandwidth.

    For packed tokens, codes and parameters are counted, except the cross factors of the kind ``cross``. For tokens in
    full precision, two bytes per element are counted.
    """
    total = 0.0
    for i, pair in enumerate(work.phases):
        tokens = sum(row[i][2] for row in work.counts)
        for part, channels in zip(pair, (work.key_dim, work.value_dim), strict=True):
            form = part.format
            bits = form.bits + (8 * form.group_bytes / form.group if form.group else 0)
            total += tokens * work.heads * channels * bits / 8
    return int(total)


def microseconds(attend: Attend, query: Tensor, works: list[Work], scaling: float) -> float:
    """Return the median time of one call of `attend`, in microseconds.

    The calls are recorded in one CUDA graph. Replays of the graph are timed and divided by its number of calls.

    Args:
        works: layers of equal shape: the first call reads the first layer, the second call the second, and so on in
            circles. Together they should be larger than the L2 cache, so that every call reads from memory.
    """
    graph = torch.cuda.CUDAGraph()
    calls = len(works) * max(1, 8 // len(works))
    with torch.cuda.graph(graph):
        for i in range(calls):
            attend(query, works[i % len(works)], scaling)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 8 or (time.perf_counter() - started < 0.15 and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def measure_case(case: Case, name: str, module: Any) -> dict[str, Any]:
    """Compare a kernel's output with the reference in one configuration, and time it if ``case.timed``.

    Returns:
        A line of the report: ``case`` and ``kernel``; then either ``refused`` (the kernel's reason), or ``error``
        (relative error) and ``ok``; for a timed case also ``us`` (microseconds) and ``gbs`` (GB/s).
    """
    line: dict[str, Any] = {"case": case.name, "kernel": name}
    query, work = case.query(), case.work(0)
    reason = module.refuses(query, work) if hasattr(module, "refuses") else None
    if reason:
        return {**line, "refused": reason}
    scaling = query.shape[-1] ** -0.5
    output = module.attend(query, work, scaling)
    few = 2 if case.timed else None
    wanted = dequantized_attention(query, work, scaling, slice(0, few))
    line["error"] = relative_error(output[:, :, : wanted.shape[2]], wanted)
    line["ok"] = line["error"] < TOLERANCE * (1.5 if case.dtype == torch.bfloat16 else 1)
    if case.timed:
        size = nbytes(work)
        works = [work] + [case.work(seed) for seed in range(1, -(-ROTATED // size))]
        line["us"] = round(microseconds(module.attend, query, works, scaling), 2)
        line["gbs"] = round(size / line["us"] / 1e3)
    return line


def report_line(line: dict[str, Any]) -> str:
    """Format a line of the report for the screen.

    Args:
        line: result of :func:`measure_case`; or a dict with ``case``, ``kernel`` and, under ``failed``, an error
            message.
    """
    if "failed" in line or "refused" in line:
        return f"{line['case']:44s} {line['kernel']:7s} {'FAILED' if 'failed' in line else 'refused'}: " + (
            line.get("failed") or line["refused"]
        )
    timing = f"{line['us']:9.2f} us {line['gbs']:6d} GB/s" if "us" in line else ""
    return f"{line['case']:44s} {line['kernel']:7s} {line['error']:.5f} {'' if line['ok'] else 'WRONG '}{timing}"


def measure_cases(todo: list[tuple[Case, str]], done: int, log: Path, names: str) -> int:
    """Measure the pairs ``todo[done:]`` of configuration and kernel; the main loop of a worker process.

    After an error that corrupts the CUDA context, the worker stops, and the parent process starts another one.

    Args:
        log: file to which the result for each pair is appended as a line of JSON.

    Returns:
        The exit status: 0 after the last pair; 1 as soon as an error has corrupted the CUDA context.
    """
    modules = kernels(names)
    for case, name in todo[done:]:
        if name not in modules:
            line: dict[str, Any] = {"case": case.name, "kernel": name, "refused": "cannot be imported"}
        else:
            try:
                line = measure_case(case, name, modules[name])
                torch.cuda.synchronize()
            except Exception as problem:  # any error: the next configuration is tried anyway
                line = {"case": case.name, "kernel": name, "failed": f"{type(problem).__name__}: {str(problem)[-300:]}"}
        print(report_line(line), flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        try:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        except RuntimeError:
            return 1
    return 0


def compile_cases(chosen: list[Case], share: str) -> None:
    """Compile the Triton kernels of some configurations in advance, by running each on a short context.

    Args:
        share: which configurations this worker compiles: ``"i/n"`` for every n-th one, starting with number i (from 0).
    """
    first, of = (int(x) for x in share.split("/"))
    module = kernels("triton").get("triton")
    for case in chosen[first::of]:
        try:
            short = case.shortened()
            query, work = short.query(), short.work(0)
            if module is not None and module.refuses(query, work) is None:
                module.attend(query, work, 1.0)
                torch.cuda.synchronize()
        except Exception as problem:  # reported when the configuration is measured
            print(f"# {case.name}: {type(problem).__name__}: {str(problem)[-200:]}", flush=True)


def main() -> int:
    """Run ``python -m kvbench.attention.check_kernels``: check the kernels in worker processes, and print the report.

    Returns:
        The exit status: 1 if any configuration has failed or has a wrong result, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m kvbench.attention.check_kernels", description=__doc__)
    parser.add_argument(
        "--only", default="", help="check only configurations whose name matches this regular expression"
    )
    parser.add_argument("--kernels", default="triton,cuda", help="kernels to check, separated by commas")
    parser.add_argument(
        "--tune", default="", help='Triton launch choices, "warps=1,stages=4" or "2:warps=2;4:stages=4"'
    )
    parser.add_argument("--out", type=Path, help="also write all lines to this JSON file")
    parser.add_argument(
        "--workers", type=int, default=min(12, os.cpu_count() or 1), help="number of processes that compile"
    )
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [case for case in cases() if re.search(given.only, case.name)]
    todo = [(case, name) for case in chosen for name in given.kernels.split(",")]
    if given.compile or given.log:
        if "triton" in given.kernels:
            tune(given.tune)
        if given.compile:
            compile_cases(chosen, given.compile)
            return 0
        return measure_cases(todo, given.done, given.log, given.kernels)

    again = [sys.executable, "-m", "kvbench.attention.check_kernels", "--only", given.only, "--tune", given.tune]
    again += ["--kernels", given.kernels]
    started = time.perf_counter()
    if "triton" in given.kernels and given.workers > 1:
        workers = min(given.workers, len(chosen))
        compilers = [subprocess.Popen([*again, "--compile", f"{i}/{workers}"]) for i in range(workers)]
        for process in compilers:
            process.wait()
    print(f"# compiled after {time.perf_counter() - started:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "lines.jsonl"
        log.touch()
        lines: list[dict[str, Any]] = []
        while len(lines) < len(todo):
            ended = subprocess.run([*again, "--log", str(log), "--done", str(len(lines))], check=False).returncode
            finished = [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines()]
            if len(finished) == len(lines):  # died in its first configuration
                case, name = todo[len(lines)]
                finished.append({"case": case.name, "kernel": name, "failed": f"process ended with {ended}"})
                log.write_text("".join(json.dumps(line) + "\n" for line in finished), encoding="utf-8")
                print(report_line(finished[-1]), flush=True)
            lines = finished
    bad = [line for line in lines if "failed" in line or line.get("ok") is False]
    print(f"# {len(lines)} lines, {len(bad)} wrong or failed, {time.perf_counter() - started:.0f} s", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"torch": torch.__version__, "tune": given.tune, "lines": lines}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
