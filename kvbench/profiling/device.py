"""Device names as the vendor gives them; timings are recorded separately for each name."""

from __future__ import annotations

import torch


def device_name(device: torch.device | str) -> str | None:
    """Return a device's name, such as ``NVIDIA H200``; None for a CPU, whose name torch does not know.

    For other types of device, the type (``mps``).
    """
    device = torch.device(device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return None if device.type == "cpu" else device.type
