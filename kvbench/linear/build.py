"""Configurations and launches of the CUDA kernel that multiplies a few rows by a weight matrix.

The source is ``cuda/*``; :mod:`kvbench.util.nvrtc` compiles, loads and launches it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvbench.linear import layout
from kvbench.util import nvrtc

#: the files of each kernel's source, in the order in which they are joined
PARTS = {
    "product": ("instructions.cuh", "loads.cuh", "multiply.cuh", "product.cu"),
    "int4": ("instructions.cuh", "int4.cu"),
    "dequantize": ("instructions.cuh", "dequantize.cu"),
}
#: warps in a CTA of the kernel that dequantizes
WARPS = 8
#: largest number of rows of x that the kernel multiplies
ROWS = 16


@dataclass(frozen=True)
class Build:
    """Compile-time configuration of a kernel: the values of the macros that its source reads and explains.

    The source is ``cuda/int4.cu`` for 4-bit weights and ``cuda/product.cu`` for 16-bit weights.
    A *block* is the output channels that a CTA computes at a time; the warps of the CTA share out the input channels.

    Args:
        bits: bits of a weight, 4 or 16.
        bf16: True if x and the output are bf16; False for fp16 (``BF16``).
        wide: True for 9 to 16 rows of x, False for 1 to 8 (``NT``).
        unit: input channels of a slot of the ring, which must divide those of the matrix: 128, or 64 with 16 bits
            (``UNIT``).
        group: input channels that share a scale; 0 with 16 bits (``GROUP``).
        half: True if scales are fp16, False if they are bf16 (``HALF``).
        tiles: tiles of 16 output channels in a block (``MT``).
        warps: warps in a CTA (``WARPS``).
        spread: True if the warps take units of input channels in turn, so that a CTA reads long pieces of rows; False
            if each takes a range (``SPREAD``; 16 bits).
        stages: slots in a warp's ring buffer (``STAGES``).
        keep: True if a warp keeps its part of x in shared memory; False if x passes through the ring (``XRES``).
        direct: True if weights pass through registers, `stages` steps ahead, instead of a ring in shared memory; it
            requires `keep` (``DIRECT``; 16 bits).
        chains: accumulators that the matrix instructions use in turn, 1 or 2 (``CHAINS``).
        early: slots whose weights a launch requests before the preceding kernel has ended, by programmatic dependent
            launch (``EARLY``, ``PDL``); 0: an ordinary launch.
        hint: how weights pass the L2 cache: 0: as the hardware decides; 1: marked to be evicted first; 2: as 1, and
            fetched 256 bytes at a time (``HINT``).
        resident: CTAs that a multiprocessor must be able to run at once, which bounds registers (``MINB``).
    """

    bits: int
    bf16: bool = True
    wide: bool = False
    unit: int = 128
    group: int = 0
    half: bool = True
    tiles: int = 1
    warps: int = 8
    stages: int = 4
    keep: bool = True
    spread: bool = False
    direct: bool = False
    chains: int = 1
    early: int = 0
    hint: int = 1
    resident: int = 1

    @property
    def slot(self) -> int:
        """Bytes of weights and scales in a slot of the ring."""
        scales = 64 * self.unit // self.group if self.bits == 4 else 0
        return self.tiles * (layout.ROWS * self.unit * self.bits // 8 + scales)

    def shared(self, rows: int, columns: int) -> int:
        """Return the bytes of shared memory that a CTA needs for an x of `rows` rows and `columns` input channels."""
        units, part = -(-columns // self.unit // self.warps), rows * self.unit * 2
        if self.direct:  # the steps of a warp are made a multiple of the stages
            steps = 1 if self.bits == 4 else self.unit // 32
            units = -(-units * steps // self.stages) * self.stages // steps
        resident = units * part if self.keep else 0
        slot = self.slot + (0 if self.keep else part)
        sums = 2 * self.tiles * (2 if self.wide else 1) * 512
        return self.warps * (sums + resident + (0 if self.direct else self.stages * slot))

    @property
    def source(self) -> str:
        """CUDA source of the kernel with this configuration."""
        return self.macros() + linear_source("int4" if self.bits == 4 else "product")

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        values = {
            "UNIT": self.unit,
            "HINT": self.hint,
            "BF16": int(self.bf16),
            "GROUP": self.group,
            "HALF": int(self.half),
            "NT": 2 if self.wide else 1,
            "MT": self.tiles,
            "WARPS": self.warps,
            "SPREAD": int(self.spread),
            "STAGES": self.stages,
            "XRES": int(self.keep),
            "DIRECT": int(self.direct),
            "CHAINS": self.chains,
            "EARLY": self.early,
            "PDL": int(self.early > 0),
            "MINB": self.resident,
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())


@cache
def linear_source(name: str = "product") -> str:
    """Return the CUDA source of a kernel (:data:`PARTS`) without the macros that configure it."""
    folder = Path(__file__).parent / "cuda"
    return "\n".join((folder / part).read_text(encoding="utf-8") for part in PARTS[name])


@lru_cache(maxsize=1024)
def function(build: Build, rows: int, columns: int, device: int) -> nvrtc.Function:
    """Return the kernel, compiled, and loaded on GPU number `device`; equal calls return the same object.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    shared = build.shared(rows, columns)
    return nvrtc.Function(build.source, "product", device, build.warps * 32, shared, overlapped=build.early > 0)


def launch_build(
    build: Build,
    x: Tensor,
    weight: Tensor,
    groups: Tensor | None,
    channels: int,
    bias: Tensor | None,
    out: Tensor,
    ctas: int | None = None,
) -> None:
    """Launch the kernel on the current stream; the tensors must have the layout that the kernel reads.

    Args:
        x: input, contiguous ``[rows, columns]``.
        weight: codes (:mod:`kvbench.linear.layout`), or 16-bit weights ``[channels, columns]``.
        groups: scales and zeros of 4-bit weights; None with 16 bits.
        channels: output channels.
        bias: ``[channels]``, in the dtype of x; None: no bias.
        out: output, contiguous ``[rows, channels]``.
        ctas: largest number of CTAs of a multiprocessor; None: as many as it can run.
    """
    rows, columns = x.shape
    device = x.device.index or 0
    kernel = function(build, rows, columns, device)
    tiles = -(-channels // layout.ROWS)
    # resident // fit is the number of multiprocessors
    most = kernel.resident if ctas is None else min(ctas, kernel.fit) * (kernel.resident // kernel.fit)
    arguments = struct.pack(
        "5Pq4i",
        x.data_ptr(),
        weight.data_ptr(),
        0 if groups is None else groups.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0 if groups is not None else weight.stride(0) * weight.element_size(),
        channels,
        columns,
        rows,
        tiles,
    )
    # blocks of 4 bits go to the CTAs in turn; rows of 16 bits are shared out equally, at least 8 to a CTA
    parts = -(-tiles // build.tiles) if build.bits == 4 else -(-channels // 8)
    grid = min(parts, most)
    kernel.launch((grid, 1, 1), arguments, torch.cuda.current_stream(x.device).cuda_stream)


@lru_cache(maxsize=64)
def dequantizer(group: int, half: bool, bf16: bool, device: int) -> nvrtc.Function:
    """Return the kernel that dequantizes 4-bit weights, compiled, and loaded on GPU number `device`.

    `group` and `half` are as for :class:`Build`; `bf16` is True to write bf16, False for fp16.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    values = {"GROUP": group, "HALF": int(half), "BF16": int(bf16), "WARPS": WARPS}
    macros = "".join(f"#define {name} {value}\n" for name, value in values.items())
    return nvrtc.Function(macros + linear_source("dequantize"), "dequantize", device, WARPS * 32, 0)


def dequantize(codes: Tensor, groups: Tensor, group: int, half: bool, out: Tensor) -> None:
    """Write dequantized weights on the current stream; `group` and `half` are as for :class:`Build`.

    Args:
        codes: codes (:mod:`kvbench.linear.layout`).
        groups: scales and zeros.
        out: bf16 or fp16 ``[channels, columns]``, contiguous; 64 must divide `columns`.
    """
    kernel = dequantizer(group, half, out.dtype == torch.bfloat16, out.device.index or 0)
    arguments = struct.pack("3P2i", codes.data_ptr(), groups.data_ptr(), out.data_ptr(), *out.shape)
    kernel.launch((len(codes), 1, 1), arguments, torch.cuda.current_stream(out.device).cuda_stream)
