"""Device names as the vendor gives them; timings are recorded separately for each name."""

from __future__ import annotations

import torch


def device_name(device: torch.device | str) -> str | None:
    """Return the vendor's name of a device, such as ``NVIDIA H200``.

    The result is None for a CPU, whose name torch does not know, and the type for any other device, such as ``mps``.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return None if device.type == "cpu" else device.type
