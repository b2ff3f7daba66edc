"""The CUDA decode kernel compiled for GPUs that this machine need not have: registers and shared memory fit them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from kvbench.attention.cuda import config, decode
from kvbench.attention.cuda.config import Build
from kvbench.attention.phases import Format
from kvbench.attention.synthetic import FULL
from kvbench.util.nvrtc import OPTIONS, ask
from tests.attention.test_cuda_decode import FORMATS, formats

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
#: query rows of a KV head: one new token of 7B, five of it, two to nine of 8B
ROWS = (1, 5, 8, 12, 20, 28, 36)
#: registers of a multiprocessor, and of a thread at most, of all of them
REGISTERS, OF_A_THREAD = 65536, 255


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="needs nvrtc: pip install -e .[nvrtc]")
    try:
        bindings.nvrtcVersion()
    except Exception as error:  # the bindings are there, but not the library
        pytest.skip(f"needs nvrtc: {error}")
    return bindings


def use(nvrtc: Any, chosen: Build, capability: tuple[int, int]) -> tuple[int, int, int]:
    """Registers of a thread, bytes that spill, and static shared memory, as the compiler reports them."""
    architecture = "--gpu-architecture=sm_{}{}".format(*capability)
    options = [option.encode() for option in (architecture, *OPTIONS, "--ptxas-options=-v")]
    program = ask(nvrtc.nvrtcCreateProgram((chosen.macros() + decode.cuda_source()).encode(), b"decode.cu", 0, [], []))
    return report(nvrtc, program, options)


def report(nvrtc: Any, program: Any, options: list[bytes]) -> tuple[int, int, int]:
    """Compile a program of nvrtc, and return what :func:`use` does."""
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0].value
    log = bytearray(ask(nvrtc.nvrtcGetProgramLogSize(program)))
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode()
    assert not status, text
    numbers = [
        re.search(pattern, text)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
    ]
    return tuple(int(found[1]) for found in numbers)  # type: ignore[index, return-value]


def check(nvrtc: Any, name: str, rows: int, capability: tuple[int, int]) -> None:
    shared = config.shared_memory(capability)
    chosen = config.build((tuple(formats(name)), (FULL, FULL)), 128, rows, True, shared)  # type: ignore[arg-type]
    assert chosen.fits(shared)
    registers, spilled, static = use(nvrtc, chosen, capability)
    assert static == chosen.occupied - chosen.shared - config.RESERVED
    assert registers <= OF_A_THREAD and -(-registers // 8) * 8 * chosen.warps * 32 * chosen.resident <= REGISTERS
    assert spilled <= 400  # bytes of a thread, of its 1 KiB of registers


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("name", "rows"), [("int8 two nibbles", 20), ("int3 G128", 1)])
def test_the_heaviest_kernels_fit_every_gpu(nvrtc: Any, name: str, rows: int, capability: tuple[int, int]) -> None:
    check(nvrtc, name, rows, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_kernel_fits_every_gpu(nvrtc: Any, name: str, rows: int, capability: tuple[int, int]) -> None:
    check(nvrtc, name, rows, capability)


@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)]
)
def test_shared_memory_is_that_of_the_gpu(capability: tuple[int, int], kib: int) -> None:
    assert config.shared_memory(capability) == kib * 1024


def test_an_unknown_gpu_is_taken_for_the_smallest() -> None:
    assert config.shared_memory((13, 7)) == 99 * 1024


@pytest.mark.parametrize("name", FORMATS)
def test_every_choice_fits_into_shared_memory(name: str) -> None:
    for capability, rows in itertools.product(CAPABILITIES, ROWS):
        shared = config.shared_memory(capability)
        for phases in ((tuple(formats(name)), (FULL, FULL)), (tuple(formats(name)), (Format("full", 16), FULL))):
            chosen = config.build(phases, 128, rows, True, shared)  # type: ignore[arg-type]
            assert chosen.fits(shared) and chosen.warps * 32 <= 1024, (capability, rows)
