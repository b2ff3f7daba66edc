"""A ceiling on memory turns an allocation into an out-of-memory error, and goes away afterwards."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from kvbench.profiling.device import limited
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
    with limited("mps", 1.0) as held:  # a device whose memory cannot be limited
        assert not held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts private memory")
def test_the_old_limits_come_back_after_an_error():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ValueError), limited("cpu", 8.0):
        assert resource.getrlimit(resource.RLIMIT_DATA)[1] == before[1]
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] != before[0]
        raise ValueError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(("device", "limit_gb", "fraction", "index"), [("cuda", 2.0, 0.25, 1), ("cuda:0", 99, 1.0, 0)])
def test_the_share_of_a_gpu_is_set_and_taken_back(monkeypatch, device, limit_gb, fraction, index):
    calls = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *pair: calls.append(pair))
    with pytest.raises(ValueError), limited(device, limit_gb) as held:
        assert held and calls == [(fraction, index)]
        raise ValueError
    assert calls == [(fraction, index), (1.0, index)]


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
