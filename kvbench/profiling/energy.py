"""Energy of a stretch of work, as the difference of two readings of NVML's energy counter.

The counter (``nvmlDeviceGetTotalEnergyConsumption``, Volta and later) counts the millijoules of the whole board since
the driver was loaded. How often it is updated is not documented, so a stretch shorter than :data:`ENOUGH_S` has no
energy per token.

The package for NVML is optional (``pip install 'kvbench[energy]'``); its module is called ``pynvml``. Nothing here
changes a setting of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
