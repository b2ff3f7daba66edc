"""Device names as the vendor gives them; timings are recorded separately for each name."""

from __future__ import annotations

import torch


def device_name(device: torch.device | str) -> str | None:
    """Return the product name of a GPU, such as ``NVIDIA H200``.

    Returns:
        The name that CUDA reports; None for a CPU, whose name torch does not know; for any other device its type, such
        as ``mps``.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return None if device.type == "cpu" else device.type
