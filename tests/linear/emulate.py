"""The CUDA kernels as programs of this machine: their source, compiled by g++ with emulated instructions."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.linear import build, int4
from kvbench.linear.build import Build

HERE = Path(__file__).parent


def product(
    config: Build,
    x: Tensor,
    weight: Tensor,
    groups: Tensor | None,
    channels: int,
    bias: Tensor | None,
    ctas: int,
    folder: Path,
) -> Tensor:
    """The output of the kernel on `ctas` CTAs, one after another; each thread of a CTA is one of this machine."""
    out = torch.full((len(x), channels), float("nan"), dtype=x.dtype)
    addresses = [0 if t is None else t.data_ptr() for t in (x, weight, groups, bias, out)]
    stride = 0 if groups is not None else weight.stride(0) * weight.element_size()
    arguments = struct.pack("5Pq4i", *addresses, stride, channels, x.shape[1], len(x), -(-channels // 16))
    assert config.shared(*x.shape) <= 227 * 1024
    _run("int4" if config.bits == 4 else "product", config.macros(), arguments, ctas, folder)
    return out


def dequantized(weight: int4.Int4Weight, dtype: torch.dtype, folder: Path) -> Tensor:
    """The weights as the kernel that dequantizes writes them."""
    out = torch.full((weight.rows, weight.columns), float("nan"), dtype=dtype)
    arguments = struct.pack("3P2i", *(t.data_ptr() for t in (weight.codes, weight.groups, out)), *out.shape)
    values = {"GROUP": weight.group, "HALF": int(weight.dtype == torch.float16), "BF16": int(dtype == torch.bfloat16)}
    macros = "".join(f"#define {name} {value}\n" for name, value in (values | {"WARPS": 1}).items())
    _run("dequantize", macros, arguments, len(weight.codes), folder)
    return out


def _run(kernel: str, macros: str, arguments: bytes, ctas: int, folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for this machine")
    parts = [part for part in build.PARTS[kernel] if part != "instructions.cuh"]
    text = "\n".join((Path(build.__file__).parent / "cuda" / part).read_text(encoding="utf-8") for part in parts)
    name = "dequantize" if kernel == "dequantize" else "product"
    source = folder / "kernel.cpp"
    source.write_text(
        f'#define KERNEL {name}\n{macros}#include "warp.hpp"\n{text}\n#include "run.hpp"\n', encoding="utf-8"
    )
    options = ["-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", "-I", str(HERE)]
    subprocess.run(["g++", *options, str(source), "-o", str(folder / "kernel.so")], check=True)
    ctypes.CDLL(str(folder / "kernel.so")).run(ctypes.create_string_buffer(arguments, len(arguments)), ctas)
