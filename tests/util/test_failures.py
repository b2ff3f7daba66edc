"""Errors for lack of memory, and the requested bytes, in the words of each allocator."""

from __future__ import annotations

import pytest
import torch

from kvbench.profiling.device import limited
from kvbench.util.failures import bytes_asked, describe_error, is_out_of_memory

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.2 GiB is free"
)
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 123 bytes.")


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (CUDA, int(20.5 * 2**30)),
        (CPU, 4 * 10**12),
        (WINDOWS, 123),
        (MemoryError("Unable to allocate 7.28 TiB for an array with shape (1,)"), int(7.28 * 2**40)),
        (RuntimeError("unable to mmap 123 bytes from file <x>: Cannot allocate memory (12)"), 123),
        (MemoryError(), None),
        (OSError(12, "Cannot allocate memory"), None),
        (RuntimeError("std::bad_alloc"), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (torch.OutOfMemoryError("Tried to allocate 3.00 MiB"), 3 * 2**20),
        (torch.OutOfMemoryError("Tried to allocate 3 KiB"), 3 * 2**10),
        (torch.OutOfMemoryError("tried to allocate 12"), 12),
        (OSError("unable to mmap 5 bytes from file <x>: Cannot allocate memory (12)"), 5),
    ],
)
def test_out_of_memory(error, count):
    assert is_out_of_memory(error)
    assert bytes_asked(error) == count


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory of my own"), OSError("x")])
def test_other_errors(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "said", ["error return without exception set", "<method 'x'> returned NULL without setting an exception"]
)
def test_an_extension_that_fails_without_a_word_has_run_out_of_memory_where_that_is_limited(said):
    assert not is_out_of_memory(SystemError(said))
    with limited("cpu", 64.0) as set_here:
        assert is_out_of_memory(SystemError(said)) is set_here
        for other in ("unknown opcode", "ended without a word", "an exception of another kind"):
            assert not is_out_of_memory(SystemError(other))


def test_a_real_one():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**56, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert bytes_asked(error.value) == 2**56


def test_describe_is_bounded():
    try:
        raise ValueError("a" + "x" * 100_000 + "z")
    except ValueError as error:
        message = describe_error(error)
    assert message == {"type": "ValueError", "message": "a" + "x" * 3999, "traceback": "x" * 7998 + "z\n"}
    try:
        raise ValueError("short")
    except ValueError as error:
        trace = describe_error(error)["traceback"]
    assert trace.startswith("Traceback") and "in test_describe_is_bounded" in trace and trace.endswith("short\n")


def test_an_error_that_came_of_memory_is_one_of_memory():
    def capture(kind: type[Exception]) -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            finally:
                raise kind("CUDA error: operation failed due to a previous error during capture")
        except Exception as error:
            return error

    assert is_out_of_memory(capture(RuntimeError))
    assert not is_out_of_memory(capture(ValueError))
