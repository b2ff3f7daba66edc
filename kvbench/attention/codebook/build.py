"""Compilation of the CUDA kernel for a codebook's codes by nvrtc, once per machine."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch

from kvbench.attention.codebook.config import Build
from kvbench.attention.cuda import build as uniform
from kvbench.util import nvrtc

#: the files of the source, in the order in which they are joined; those of the kernel for uniform levels are shared
PARTS = (
    "header.cuh",
    "lookup.cuh",
    "loads.cuh",
    "rotation.cuh",
    "outliers.cuh",
    "scores.cuh",
    "values.cuh",
    "exact.cuh",
    "merge.cuh",
    "decode.cu",
)
SHARED = ("instructions.cuh", "splits.cuh")


class Kernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: Build, device: int) -> None:
        self.build = build
        overlapped = uniform.OVERLAPPED and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(build.macros() + source(), "decode", device, build.warps * 32, build.shared, overlapped)


@cache
def source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    first, *others = (part(name) for name in PARTS)
    return "\n".join([first, *map(uniform.part, SHARED), *others])


def part(name: str) -> str:
    """Return one of the files of the CUDA source."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def kernel(build: Build, device: int) -> Kernel:
    """Return the CUDA kernel for a configuration, compiled and loaded on a GPU; equal calls share one kernel.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    return Kernel(build, device)
