"""Device names as the vendor gives them; timings are recorded separately for each name."""

from __future__ import annotations

import torch


def device_name(device: torch.device | str) -> str | None:
    """Return the product name of a GPU, such as ``NVIDIA H200``.

    None for a CPU, whose name torch does not know; for any other device its type, such as ``mps``.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return None if device.type == "cpu" else device.type


def identity(device: torch.device | str) -> tuple[str, int] | None:
    """Return a name of a GPU that is the same in all processes, and its memory in bytes; None for other devices."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{properties.name} {device.index or 0}"), properties.total_memory
