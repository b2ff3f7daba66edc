"""The CUDA kernel for a codebook's codes compiled for GPUs that this machine need not have."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.attention.codebook.decode import CodebookBuild, choose_warps, codebook_source
from kvbench.attention.cuda.config import RESERVED, shared_memory
from kvbench.util.nvrtc import OPTIONS, ask
from tests.attention.test_cuda_compile import CAPABILITIES, OF_A_THREAD, REGISTERS, nvrtc, report

__all__ = ["nvrtc"]  # a fixture


def layer(rows: int, bits: int = 3, heads: int = 32, channels: int = 128) -> CodebookBuild:
    """A layer of a model in bf16 with packed tokens and an empty tail."""
    return CodebookBuild(channels, bits, rows, heads, min(128, 65536 // (heads * channels)), True, 2, 0, True, True)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("rows", "heads"), [(1, 32), (4, 8), (8, 8)])
def test_some_number_of_warps_fits_every_gpu(capability: tuple[int, int], rows: int, heads: int) -> None:
    shared = shared_memory(capability)
    assert choose_warps(layer(rows, heads=heads), shared, 64).fits(shared)


def test_a_gpu_with_less_shared_memory_gets_fewer_warps() -> None:
    assert [choose_warps(layer(1), shared_memory(at), 64).warps for at in ((9, 0), (8, 0), (8, 6))] == [16, 12, 8]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_registers_and_shared_memory(nvrtc: Any, bits: int, rows: int) -> None:
    for capability in ((8, 0), (9, 0)) if bits == 3 else ((8, 9),):
        config = choose_warps(layer(rows, bits, 32 // rows), shared_memory(capability), 64)
        architecture = "--gpu-architecture=sm_{}{}".format(*capability)
        options = [option.encode() for option in (architecture, *OPTIONS, "--ptxas-options=-v")]
        source = (config.macros() + codebook_source()).encode()
        registers, spilled, static = report(
            nvrtc, ask(nvrtc.nvrtcCreateProgram(source, b"decode.cu", 0, [], [])), options
        )
        assert config.shared + static + RESERVED <= shared_memory(capability) + RESERVED
        assert registers <= OF_A_THREAD and -(-registers // 8) * 8 * config.warps * 32 * config.resident <= REGISTERS
        assert spilled <= 40
