"""Names of devices under which times are recorded."""

from __future__ import annotations

import torch

from kvbench.profiling.device import device_name


def test_a_gpu_has_its_vendors_name_and_a_cpu_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {device}")
    assert device_name("cuda:1") == "NVIDIA cuda:1"
    assert device_name("cpu") is None
    assert device_name(torch.device("mps")) == "mps"
