"""The machine record with a stand-in for NVML: figures, reasons for what is missing, the energy counter."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from kvbench.profiling import machine
from kvbench.profiling.machine import Board, Counter, Reading, Unavailable, idle_power, open_board, used


class NVMLError(Exception):
    """The error that the stand-in raises."""


class Library:
    """A GPU that supports everything but MIG, whose counter gains 7 J a reading."""

    NVMLError = NVMLError
    opened: str

    def __init__(self) -> None:
        self.millijoules = 1000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.opened = uuid
        if uuid == "GPU-none":
            raise NVMLError("Not Found")
        return "handle"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13010

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert handle == "handle"
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x1 | 0x20 | 0x1000

    def nvmlDeviceGetMigMode(self, handle):
        raise NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.millijoules += 7000
        return self.millijoules

    nvmlDeviceGetName = staticmethod(lambda handle: "NVIDIA H200")
    nvmlDeviceGetUUID = staticmethod(lambda handle: "GPU-1")
    nvmlDeviceGetPerformanceState = staticmethod(lambda handle: 0)
    nvmlDeviceGetTemperature = staticmethod(lambda handle, sensor: 41)
    nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 123_400)
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 700_000)
    nvmlDeviceGetPersistenceMode = staticmethod(lambda handle: 1)
    nvmlDeviceGetEccMode = staticmethod(lambda handle: [1, 1])


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device with this UUID, as torch reports it."""

    def with_uuid(uuid: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))

    return with_uuid


def test_every_figure_or_a_reason(gpu):
    gpu("abc")
    library = Library()
    record = machine.machine_state("cuda", library)
    assert library.opened == "GPU-abc" and record["source"] == "NVML"
    figures = record["gpu"]
    assert figures == {
        "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1", "cuda_driver": "13.1", "sm_mhz": 1980,
        "memory_mhz": 3201, "sm_max_mhz": 1980, "event_reasons": ["gpu_idle", "sw_thermal_slowdown", "0x1000"],
        "pstate": "P0", "temperature_c": 41, "power_w": 123.4, "power_limit_w": 700, "persistence": True, "ecc": True,
        "mig": None, "other_processes": 1,
    }  # fmt: skip
    assert record["missing"]["mig"] == "NVML, GetMigMode: Not Supported"
    assert all(record["missing"][name] for name in ("governor", "load") if record[name] is None)


def test_nvidia_smi_takes_over_without_nvml(gpu, monkeypatch):
    gpu("GPU-none")
    texts = {column: "1980" for column, _ in machine.SMI.values()}
    texts |= {"clocks_event_reasons.active": "0x0000000000000004", "mig.mode.current": "[N/A]", "power.draw": "[N/A]"}
    texts |= {"ecc.mode.current": "Enabled"}
    monkeypatch.setattr(machine, "_smi", lambda uuid: texts if uuid == "GPU-none" else {})
    record = machine.machine_state("cuda", Library())
    assert record["source"] == "nvidia-smi (NVML: Not Found)"
    assert record["gpu"]["event_reasons"] == ["sw_power_cap"] and record["gpu"]["sm_mhz"] == 1980.0
    assert record["gpu"]["ecc"] is True and record["gpu"]["power_w"] is None
    assert record["gpu"]["mig"] is None and record["missing"]["mig"] == "nvidia-smi answers '[N/A]'"
    assert record["missing"]["power_w"] == "nvidia-smi answers '[N/A]'"
    assert record["missing"]["cuda_driver"] == "nvidia-smi is not asked for it"
    monkeypatch.setattr(machine, "_smi", lambda uuid: "nvidia-smi: not installed")
    record = machine.machine_state("cuda", Library())
    assert record["gpu"] is None and record["missing"]["gpu"] == "NVML: Not Found; nvidia-smi: not installed"


def test_other_devices_and_a_missing_package(gpu, monkeypatch):
    record = machine.machine_state("cpu")
    assert record["gpu"] is None and record["missing"]["gpu"] == "measured on a cpu device"
    gpu("abc")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it then raises ImportError
    with pytest.raises(Unavailable, match=r"pip install 'kvbench\[energy\]'"):
        open_board("cuda")
    assert Counter.of("cpu").reason == "NVML knows NVIDIA GPUs only, not a cpu device"
    assert Counter.of("cpu").read() is None and idle_power(Counter.of("cpu")) is None
    with pytest.raises(Unavailable, match="does not have nvmlDeviceGetNothing"):
        Board(Library(), "handle").read("GetNothing")


def test_energy_is_a_difference_of_the_counter(gpu):
    gpu("abc")
    counter = Counter.of("cuda", Library())
    assert counter.reason is None
    before, after = counter.read(), counter.read()
    assert before is not None and after is not None and after.joules - before.joules == pytest.approx(7)
    long = used(Reading(5, 100.0), Reading(25, 7100.0), tokens=3500)
    assert long == {"J_per_token": 2.0, "J": 7000.0, "s": 20, "W": 350.0}
    short = used(Reading(5, 100.0), Reading(14, 3250.0), tokens=3500)
    assert short["J_per_token"] is None and short["W"] == 350.0
    assert short["reason"] == "decoding took 9.0 s, and the counter needs 10 s"
    assert used(None, None, 5, "NVML: Not Found") == {"J_per_token": None, "reason": "NVML: Not Found"}
    times = iter([0.0, 2.0])
    ticking = Counter(counter.board, clock=lambda: next(times))
    assert idle_power(ticking, sleep=lambda seconds: None) == pytest.approx(3.5)
    assert machine.ENOUGH_S == 10


def test_a_counter_that_fails_meanwhile_leaves_no_energy(gpu, monkeypatch):
    gpu("abc")
    counter = Counter.of("cuda", Library())
    before = counter.read()

    def lost(*given):
        raise Unavailable("NVML, GetTotalEnergyConsumption: GPU is lost")

    assert idle_power(counter, sleep=lambda seconds: monkeypatch.setattr(Board, "read", lost)) is None
    assert used(before, counter.read(), 5, counter.reason) == {
        "J_per_token": None,
        "reason": "the energy counter could not be read",
    }
