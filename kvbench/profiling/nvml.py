"""The NVIDIA Management Library (NVML) for the GPU that torch uses, through the package ``nvidia-ml-py``.

The package is optional (``pip install 'kvbench[energy]'``); its module is called ``pynvml``. Nothing here changes a
setting of the GPU.
"""

from __future__ import annotations

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
