"""Device, driver and place of a bench's file, with GPUs that this machine need not have."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbench.bench import report


def test_the_folder_is_named_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.result_folder(None) == Path("results/cpu") and report.result_folder(Path("x")) == Path("x")
    assert set(report.described_device()) == {"device"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, folder in (("NVIDIA H200", "h200"), ("NVIDIA RTX A6000", "rtx_a6000"), ("NVIDIA A100-SXM4", "a100_sxm4")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=name: name)
        assert report.result_folder(None) == Path("results") / folder


def test_the_first_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="G", multi_processor_count=9, total_memory=3 * 2**29, L2_cache_size=3 * 2**19)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(report, "driver", lambda: "570.1")
    facts = {"device": "G", "processors": 9, "memory_GiB": 1.5, "L2_MiB": 1.5, "driver": "570.1"}
    assert report.described_device() == facts
    machine = report.machine()
    assert facts.items() <= machine.items() and machine["versions"]["torch"] == report.version("torch")
    assert set(machine) - set(facts) == {"cuda", "python", "versions", "commit", "date"}
    assert all(machine["versions"].values())


@pytest.mark.parametrize(
    ("status", "out", "driver"), [(0, "570.1\n570.2\n", "570.1"), (1, "570.1\n", None), (0, " \n", None)]
)
def test_the_driver_is_the_first_gpus(monkeypatch: pytest.MonkeyPatch, status: int, out: str, driver: str) -> None:
    monkeypatch.setattr(report.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=status, stdout=out))
    assert report.driver() == driver


def test_what_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(report.subprocess, "run", fails)
        assert report.driver() is None
    assert report.version("kvbench-is-not-here") is None


def test_a_process_is_healthy_as_long_as_cuda_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ones = torch.ones
    for total, healthy in ((1.0, True), (2.0, False)):
        monkeypatch.setattr(torch, "ones", lambda count, device, total=total: total * ones(count))
        assert report.healthy() is healthy

    def broken() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert report.healthy() is False
