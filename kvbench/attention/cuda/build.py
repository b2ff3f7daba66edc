"""Compilation of the CUDA decode kernel for a configuration, by nvrtc, once per machine.

The module :mod:`kvbench.util.nvrtc` compiles, loads and launches it; :mod:`kvbench.attention.cuda.config` chooses the
configuration.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch

from kvbench.attention.cuda.config import SLOW_INTEGERS, Build, build, shared_memory
from kvbench.attention.cuda.storage import Signature
from kvbench.util import nvrtc

#: the files of the source, in the order in which they are joined
PARTS = (
    "header.cuh",
    "instructions.cuh",
    "storage.cuh",
    "elements.cuh",
    "windows.cuh",
    "loads.cuh",
    "cross.cuh",
    "scores.cuh",
    "window_scores.cuh",
    "levels.cuh",
    "softmax.cuh",
    "values.cuh",
    "factors.cuh",
    "factored.cuh",
    "columns.cuh",
    "integer.cuh",
    "integer_values.cuh",
    "byte_levels.cuh",
    "walk.cuh",
    "queries.cuh",
    "splits.cuh",
    "merge.cuh",
    "decode.cu",
)


#: whether the kernel may be launched before the one before it has ended, for which it then waits
OVERLAPPED = True


class Kernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: Build, device: int) -> None:
        self.build = build
        overlapped = OVERLAPPED and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(build.macros() + cuda_source(), "decode", device, build.warps * 32, build.shared, overlapped)


@cache
def cuda_source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    return "\n".join(cuda_source_file(name) for name in PARTS)


def cuda_source_file(name: str) -> str:
    """Return one of the files of the CUDA source."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def cuda_kernel(
    phases: Signature,
    channels: int,
    rows: int,
    bf16: bool,
    device: int,
    tuning: tuple[tuple[str, int], ...] = (),
    softcap: bool = False,
    sinks: int = 0,
) -> Kernel:
    """Return the CUDA kernel for a layer's formats, compiled and loaded on a GPU; equal calls share one kernel.

    Args:
        tuning: overrides of ``teams``, ``stages`` and ``resident`` (:class:`Build`), as pairs of name and value.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    capability = torch.cuda.get_device_capability(device)
    known = shared_memory(capability)
    shared = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", known))
    fast = capability not in SLOW_INTEGERS
    return Kernel(build(phases, channels, rows, bf16, shared, tuning, softcap, sinks, fast), device)
