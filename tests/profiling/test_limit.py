"""A ceiling on memory turns an allocation into an out-of-memory error, and goes away afterwards."""

from __future__ import annotations

import sys

import pytest
import torch

from kvbench.failures import bytes_asked, is_out_of_memory
from kvbench.profiling.limit import limited

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
