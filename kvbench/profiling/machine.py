"""The state of the machine during a measurement: GPU clocks, power, temperature and processes, CPU load, energy.

The energy of a stretch of work is the difference of two readings of NVML's energy counter.

The counter (``nvmlDeviceGetTotalEnergyConsumption``, Volta and later) counts the millijoules of the whole board since
the driver was loaded. How often it is updated is not documented, so a stretch shorter than :data:`ENOUGH_S` has no
energy per token.

The package for NVML is optional (``pip install 'kvbench[energy]'``); its module is called ``pynvml``. Nothing here
changes a setting of the GPU.

A figure that is not available is None, and ``missing`` gives the reason.
"""

from __future__ import annotations

import csv
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class Unavailable(Exception):
    """Error raised if NVML cannot be used, or does not know a figure of this GPU; its message is the reason."""


@dataclass(frozen=True)
class Board:
    """One GPU as NVML sees it: the initialised module ``pynvml`` and its handle of the GPU."""

    nvml: Any
    handle: Any

    def read(self, function: str, *arguments: Any) -> Any:
        """Call NVML's ``nvmlDeviceFUNCTION``, such as ``GetPowerUsage``, with the GPU's handle as its first argument.

        Raises:
            Unavailable: this NVML does not have the function, or the GPU does not support it.
        """
        call = getattr(self.nvml, f"nvmlDevice{function}", None)
        if call is None:
            raise Unavailable(f"this nvidia-ml-py does not have nvmlDevice{function}")
        try:
            return call(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            raise Unavailable(f"NVML, {function}: {error}") from None


def open_board(device: torch.device | str, library: Any = None) -> Board:
    """Return NVML's view of a CUDA device, numbered as in this process; `library` is used instead of ``pynvml``.

    The GPU is found by its UUID, because NVML counts GPUs without regard to ``CUDA_VISIBLE_DEVICES``.

    Raises:
        Unavailable: the device is not a CUDA device, ``pynvml`` is not installed, or NVML does not know the GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise Unavailable(f"NVML knows NVIDIA GPUs only, not a {device.type} device")
    if library is None:
        try:
            import pynvml
        except ImportError:
            raise Unavailable("nvidia-ml-py is not installed (pip install 'kvbench[energy]')") from None
        library = pynvml
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        library.nvmlInit()
        return Board(library, library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"))
    except library.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from None


#: smallest number of seconds over which a difference of the counter is used
ENOUGH_S = 10.0


@dataclass(frozen=True)
class Reading:
    """A reading of the energy counter in joules, with the time in seconds of a monotonic clock."""

    seconds: float
    joules: float


@dataclass(frozen=True)
class Counter:
    """Energy counter of a GPU, or the reason why it cannot be read.

    Args:
        board: the GPU; None without NVML.
        reason: why `board` is None, or why the counter cannot be read; None if it can.
        clock: monotonic clock in seconds.
    """

    board: Board | None
    reason: str | None = None
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, device: torch.device | str, library: Any = None) -> Counter:
        """Open the counter of a device; the reason why it cannot be read is stored in the result.

        `library` is used instead of ``pynvml``.
        """
        try:
            board = open_board(device, library)
            board.read("GetTotalEnergyConsumption")
        except Unavailable as error:
            return cls(None, str(error))
        return cls(board)

    def read(self) -> Reading | None:
        """Read the counter; None if it cannot be read. The caller waits for the device first."""
        if self.board is None:
            return None
        try:
            return Reading(self.clock(), self.board.read("GetTotalEnergyConsumption") / 1e3)
        except Unavailable:  # such as a GPU that was lost to NVML meanwhile: the measured times remain
            return None


def used(before: Reading | None, after: Reading | None, tokens: int, reason: str | None = None) -> dict[str, Any]:
    """Return the energy that a stretch of work used.

    Args:
        before: reading at its beginning; None if the counter cannot be read.
        after: reading at its end.
        tokens: number of tokens that were generated in between, over all sequences.
        reason: why there are no readings.

    Returns:
        ``J_per_token``: joules per token, or None with the reason under ``reason``. With readings there are also ``J``,
        ``s`` and their quotient ``W``. All figures are of the whole board, idle power included.
    """
    if before is None or after is None:
        return {"J_per_token": None, "reason": reason or "the energy counter could not be read"}
    joules, seconds = after.joules - before.joules, after.seconds - before.seconds
    figures = {"J_per_token": None, "J": joules, "s": seconds, "W": joules / seconds if seconds > 0 else None}
    if seconds < ENOUGH_S:
        return figures | {"reason": f"decoding took {seconds:.1f} s, and the counter needs {ENOUGH_S:g} s"}
    return figures | {"J_per_token": joules / tokens}


def idle_power(counter: Counter, seconds: float = 2.0, sleep: Callable[[float], None] = time.sleep) -> float | None:
    """Measure the watts that the board draws while this process does nothing; None if the counter cannot be read."""
    before = counter.read()
    if before is None:
        return None
    sleep(seconds)
    after = counter.read()
    if after is None:
        return None
    return (after.joules - before.joules) / (after.seconds - before.seconds)


Record = dict[str, Any]

_SWITCH = {"Enabled": True, "Disabled": False}
#: what nvidia-smi is asked for if NVML is not available: our name -> its column and the conversion of its text
SMI: dict[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("name", str),
    "uuid": ("uuid", str),
    "driver": ("driver_version", str),
    "sm_mhz": ("clocks.current.sm", float),
    "memory_mhz": ("clocks.current.memory", float),
    "sm_max_mhz": ("clocks.max.sm", float),
    "event_reasons": ("clocks_event_reasons.active", lambda text: reasons(int(text, 16))),
    "pstate": ("pstate", str),
    "temperature_c": ("temperature.gpu", float),
    "power_w": ("power.draw", float),
    "power_limit_w": ("enforced.power.limit", float),
    "persistence": ("persistence_mode", lambda text: _SWITCH[text]),
    "ecc": ("ecc.mode.current", lambda text: _SWITCH[text]),
    "mig": ("mig.mode.current", lambda text: _SWITCH[text]),
}
#: bits of the clocks' event reasons (throttle reasons), from nvml.h
_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
#: NVML's numbers of the clocks of multiprocessors and of memory, and of the GPU's temperature sensor
_SM, _MEMORY, _SENSOR = 1, 2, 0
#: figures of a GPU: name -> how to read it from NVML
_READ: dict[str, Callable[[Board], Any]] = {
    "name": lambda board: board.read("GetName"),
    "uuid": lambda board: board.read("GetUUID"),
    "driver": lambda board: board.nvml.nvmlSystemGetDriverVersion(),
    "cuda_driver": lambda board: _version(board.nvml.nvmlSystemGetCudaDriverVersion()),
    "sm_mhz": lambda board: board.read("GetClockInfo", _SM),
    "memory_mhz": lambda board: board.read("GetClockInfo", _MEMORY),
    "sm_max_mhz": lambda board: board.read("GetMaxClockInfo", _SM),
    "event_reasons": lambda board: reasons(board.read("GetCurrentClocksEventReasons")),
    "pstate": lambda board: f"P{board.read('GetPerformanceState')}",
    "temperature_c": lambda board: board.read("GetTemperature", _SENSOR),
    "power_w": lambda board: board.read("GetPowerUsage") / 1e3,
    "power_limit_w": lambda board: board.read("GetEnforcedPowerLimit") / 1e3,
    "persistence": lambda board: bool(board.read("GetPersistenceMode")),
    "ecc": lambda board: bool(board.read("GetEccMode")[0]),
    "mig": lambda board: bool(board.read("GetMigMode")[0]),
    "other_processes": lambda board: others(board.read("GetComputeRunningProcesses")),
}


def machine_state(device: torch.device | str, library: Any = None) -> Record:
    """Return the state of a device and of the machine now; `library` is used instead of ``pynvml``.

    Returns:
        ``gpu``: figures of the GPU by name, from NVML or, without it, from nvidia-smi; None for other devices.
        ``source``: which of the two. ``governor`` and ``load``: the frequency governor of the first processor, and the
        load average of the last minute. ``missing``: for each figure that is None, the reason.
    """
    gpu: Record | None = None
    source: str | None = None
    missing: dict[str, str] = {}
    if torch.device(device).type == "cuda":
        try:
            gpu, missing = from_nvml(open_board(device, library))
            source = "NVML"
        except Unavailable as error:
            answer = _smi(f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}")
            if isinstance(answer, str):
                missing["gpu"] = f"{error}; {answer}"
            else:
                gpu, missing = from_smi(answer)
                source = f"nvidia-smi ({error})"
    else:
        missing["gpu"] = f"measured on a {torch.device(device).type} device"
    record: Record = {"gpu": gpu, "source": source}
    for name, read in (("governor", _governor), ("load", _load_average)):
        record[name] = read()
        if record[name] is None:
            missing[name] = "this platform does not report it"
    return record | {"missing": missing}


def from_nvml(board: Board) -> tuple[Record, dict[str, str]]:
    """Read the figures of a GPU from NVML; return them, and the reasons for those that are None."""
    figures: Record = {}
    missing: dict[str, str] = {}
    for name, read in _READ.items():
        try:
            figures[name] = read(board)
        except Unavailable as error:
            figures[name], missing[name] = None, str(error)
        except (board.nvml.NVMLError, AttributeError) as error:
            figures[name], missing[name] = None, f"NVML: {error}"
    return figures, missing


def from_smi(answer: Mapping[str, str]) -> tuple[Record, dict[str, str]]:
    """Convert nvidia-smi's texts by column to a GPU's figures; return them, and the reasons for those that are None."""
    figures: Record = {}
    missing: dict[str, str] = {}
    for name in _READ:
        figures[name] = None
        column, convert = SMI.get(name, ("", str))
        if not column:
            missing[name] = "nvidia-smi is not asked for it"
        else:
            text = answer.get(column, "")
            try:
                figures[name] = convert(text)
            except (ValueError, KeyError):
                missing[name] = f"nvidia-smi answers {text!r}"
    return figures, missing


def reasons(bits: int) -> list[str]:
    """Convert NVML's bits to the names of the reasons why the clocks are below their maximum."""
    names = [name for bit, name in _REASONS.items() if bits & bit]
    rest = bits & ~sum(_REASONS)
    return [*names, *([hex(rest)] if rest else [])]


def others(processes: Any) -> int:
    """Return how many processes other than this one are in NVML's list of processes that use the GPU."""
    return sum(process.pid != os.getpid() for process in processes)


def _version(number: int) -> str:
    """Return the version that NVML encodes as a number, such as 13000 for 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _smi(uuid: str) -> dict[str, str] | str:
    """Ask nvidia-smi about a GPU; return its texts by column, or, as a text, why there is no answer."""
    columns = [column for column, _ in SMI.values()]
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    if done.returncode:
        return f"nvidia-smi: {' '.join((done.stderr or done.stdout).split())[:200]}"
    cells = next(csv.reader(done.stdout.splitlines(), skipinitialspace=True), [])
    if len(cells) != len(columns):
        return f"nvidia-smi answered {len(cells)} columns, not {len(columns)}"
    return dict(zip(columns, cells, strict=True))


def _governor() -> str | None:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
