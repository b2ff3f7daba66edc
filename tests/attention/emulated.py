"""The CUDA decode kernel as a program of this machine: its source, compiled by g++ with emulated instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.attention.cuda import build, decode
from kvbench.attention.cuda.config import Build
from kvbench.attention.phases import Work

HERE = Path(__file__).parent


def attend(config: Build, query: Tensor, work: Work, scaling: float, splits: int, folder: Path) -> Tensor:
    """The kernel's output with a configuration and a number of splits; its counters must be zero afterwards."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for this machine")
    parts = [build.part(name) for name in build.PARTS if name != "instructions.cuh"]
    source = folder / "kernel.cpp"
    code = [config.macros() + '#include "emulated.hpp"', *parts, '#include "emulated_run.hpp"']
    source.write_text("\n".join(code), encoding="utf-8")
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-I", str(HERE)]
    subprocess.run(["g++", *options, str(source), "-o", str(folder / "kernel.so")], check=True)
    batch, heads, count, channels = query.shape
    lines = batch * work.heads * -(-heads // work.heads * count // config.rows)
    out = torch.full((batch, count, heads, channels), float("nan"), dtype=query.dtype)
    partial = torch.full((lines * splits * config.columns * (channels + 2),), float("nan"))
    counter = torch.zeros(lines, dtype=torch.int32)
    arguments = decode.arguments(query, work, scaling, splits, out, partial, counter)
    grid = (splits, batch * work.heads, lines // (batch * work.heads))
    ctypes.CDLL(str(folder / "kernel.so")).run(
        ctypes.create_string_buffer(arguments, len(arguments)), *grid, config.shared
    )
    assert not counter.any()
    return out
