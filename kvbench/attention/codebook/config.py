"""The CUDA kernel for a codebook's codes: what it is compiled for, how many warps a CTA has, and its compilation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from kvbench.attention.cuda import build as uniform
from kvbench.attention.cuda.config import RESERVED
from kvbench.util import nvrtc

#: warps of a CTA and CTAs that a multiprocessor must hold, to choose from: the fastest on an H200 first
CHOICES = ((12, 1), (10, 1), (8, 1), (6, 1), (4, 1), (2, 1), (1, 1))
#: largest number of query rows that a CTA serves: the columns of a product
ROWS = 8


@dataclass(frozen=True)
class CodebookBuild:
    """Compile-time configuration of the kernel, as values for the macros that ``header.cuh`` explains.

    Args:
        channels: number of channels of a head (macro ``D``).
        bits: bits of a code (``BITS``).
        rows: number of query rows of a KV head that a CTA serves, at most 8 (``ROWS``).
        heads: number of KV heads (``HEADS``).
        block: number of tokens of a block of outliers (``BLOCK``).
        bf16: True if queries, outliers and tokens in full precision are bf16, False if they are fp16.
        phases: number of phases (``NPHASES``).
        packed: number of the packed phase (``PACKED``).
        rotate: True if keys are stored before RoPE (``ROTATE``).
        outliers: True if there are outliers (``OUTLIERS``).
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.
        warps: number of warps of a CTA (``WARPS``).
        resident: number of CTAs that a multiprocessor must be able to run at once (``MINB``), which bounds the
            registers of a thread.
    """

    channels: int
    bits: int
    rows: int
    heads: int
    block: int
    bf16: bool
    phases: int
    packed: int
    rotate: bool
    outliers: bool
    softcap: bool = False
    sinks: int = 0
    warps: int = 12
    resident: int = 1

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        values = {
            "D": self.channels,
            "BITS": self.bits,
            "ROWS": self.rows,
            "HEADS": self.heads,
            "BLOCK": self.block,
            "BF16": int(self.bf16),
            "NPHASES": self.phases,
            "PACKED": self.packed,
            "ROTATE": int(self.rotate),
            "OUTLIERS": int(self.outliers),
            "SOFTCAP": int(self.softcap),
            "SINKS": self.sinks,
            "WARPS": self.warps,
            "MINB": self.resident,
            "SHARED": self.shared,
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA in bytes: the larger of what ``CTA_BYTES`` and ``merge_warps`` need."""
        steps = self.channels // 16
        sets = 1 << (self.rows - 1).bit_length()
        common = steps * 1536 + 16 * self.channels * 2 + (self.rows + 1) * self.channels * 4 + 320
        tile = 2 * 16 * self.bits * self.channels + 512
        own = self.rows * (512 + 256) + 512 + sets * (steps // 2) * 512 + 64
        merged = self.rows * (self.channels + 4) * 4
        return max(common + self.warps * (tile + own), self.warps * max(merged, 512))

    def fits(self, shared: int) -> bool:
        """Return True if a multiprocessor has room for as many CTAs as it must run at once."""
        static = -(-(self.warps * self.rows * 8 + 4) // 128) * 128
        return (self.shared + static + RESERVED) * self.resident <= shared + RESERVED


def choose_warps(build: CodebookBuild, shared: int) -> CodebookBuild:
    """Return a configuration with the fastest number of warps that fits into shared memory, or with the smallest."""
    options = [replace(build, warps=warps, resident=resident) for warps, resident in CHOICES]
    return next((option for option in options if option.fits(shared)), options[-1])


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


class CodebookKernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: CodebookBuild, device: int) -> None:
        self.build = build
        overlapped = uniform.OVERLAPPED and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(
            build.macros() + codebook_source(), "decode", device, build.warps * 32, build.shared, overlapped
        )


@cache
def codebook_source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    first, *others = (codebook_source_file(name) for name in PARTS)
    return "\n".join([first, *map(uniform.cuda_source_file, SHARED), *others])


def codebook_source_file(name: str) -> str:
    """Return one of the files of the CUDA source."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def codebook_kernel(build: CodebookBuild, device: int) -> CodebookKernel:
    """Return the CUDA kernel for a configuration, compiled and loaded on a GPU; equal calls share one kernel.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    return CodebookKernel(build, device)
