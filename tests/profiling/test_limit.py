"""A ceiling on memory turns an allocation into an out-of-memory error, and goes away afterwards."""

from __future__ import annotations

import sys

import pytest
import torch

from kvbench.profiling.limit import limited
from kvbench.util.failures import bytes_asked, is_out_of_memory

GIB = 2**30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts private memory")
def test_on_a_cpu():
    with limited("cpu", 0.25) as held:
        assert held
        with pytest.raises(RuntimeError) as error:
            torch.empty(GIB, dtype=torch.uint8)
        torch.empty(GIB // 16, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert bytes_asked(error.value) == GIB
    torch.empty(GIB, dtype=torch.uint8)


def test_no_limit_asked_for():
    with limited("cpu", None) as held:
        assert not held


@pytest.mark.gpu
def test_on_a_gpu():
    with limited("cuda", 1.0), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts private memory")
def test_the_limit_on_a_cpu_is_in_gib_on_top_of_what_is_there():
    import resource
    from pathlib import Path

    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    with limited("cpu", 4.0):
        allowed = resource.getrlimit(resource.RLIMIT_DATA)[0] - int(line.split()[1]) * 1024
    assert abs(allowed - 4 * GIB) < GIB // 8
