"""CUDA kernels as programs of this machine: their source, compiled by g++ with emulated instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.attention.codebook import decode as codebook_build
from kvbench.attention.codebook import decode as codebook_config
from kvbench.attention.codebook import decode as codebook_decode
from kvbench.attention.cuda import decode
from kvbench.attention.cuda.config import Build
from kvbench.attention.phases import Work

HERE = Path(__file__).parent
#: options of g++ for a kernel as a program
OPTIONS = [
    "-std=c++17",  # as nvrtc reads it (kvbench/util/nvrtc.py)
    "-O0",  # the compiler takes longer than the kernel's run
    "-w",
    "-shared",
    "-fPIC",
    "-fno-gnu-unique",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-I",
    str(HERE),
]


def attend(config: Build, query: Tensor, work: Work, scaling: float, splits: int, folder: Path) -> Tensor:
    """The output of the kernel for uniform levels with a configuration and a number of splits."""
    parts = [decode.cuda_source_file(name) for name in decode.PARTS if name != "instructions.cuh"]
    return launched(config, parts, decode.cuda_arguments, query, work, scaling, splits, folder)


def attend_looked_up(
    config: codebook_config.CodebookBuild, query: Tensor, work: Work, scaling: float, splits: int, folder: Path
) -> Tensor:
    """The output of the kernel for a codebook's codes with a configuration and a number of splits."""
    first, *others = (codebook_build.codebook_source_file(name) for name in codebook_build.PARTS)
    parts = [first, decode.cuda_source_file("splits.cuh"), *others]
    return launched(config, parts, codebook_decode.codebook_arguments, query, work, scaling, splits, folder)


def launched(
    config: Build | codebook_config.CodebookBuild,
    parts: list[str],
    arguments: Callable[..., bytes],
    query: Tensor,
    work: Work,
    scaling: float,
    splits: int,
    folder: Path,
) -> Tensor:
    """The output of a kernel; its counters must be zero afterwards.

    Args:
        config: configuration of the kernel.
        parts: its source, without the instructions.
        arguments: function that serializes its argument.
        query: queries of the new tokens.
        work: the layer's stored keys and values.
        scaling: factor on scores.
        splits: number of CTAs that share the tokens of a head.
        folder: where to compile.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for this machine")
    source = folder / "kernel.cpp"
    code = [config.macros() + '#include "emulated.hpp"', *parts, '#include "emulated_run.hpp"']
    source.write_text("\n".join(code), encoding="utf-8")
    subprocess.run(["g++", *OPTIONS, str(source), "-o", str(folder / "kernel.so")], check=True)
    batch, heads, count, channels = query.shape
    lines = batch * work.heads * -(-heads // work.heads * count // config.rows)
    columns = config.columns if isinstance(config, Build) else config.rows
    out = torch.full((batch, count, heads, channels), float("nan"), dtype=query.dtype)
    partial = torch.full((lines * splits * columns * (channels + 4),), float("nan"))
    counter = torch.zeros(lines, dtype=torch.int32)
    packed = arguments(query, work, scaling, splits, out, partial, counter, work.logits.sinks)
    grid = (splits, batch * work.heads, lines // (batch * work.heads))
    ctypes.CDLL(str(folder / "kernel.so")).run(ctypes.create_string_buffer(packed, len(packed)), *grid, config.shared)
    assert not counter.any()
    return out
