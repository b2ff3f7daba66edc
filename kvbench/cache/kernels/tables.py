"""Small tables of indices and addresses for kernels, copied to a device without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (nested) list of numbers as a tensor of the same shape on `device`, copied asynchronously."""
    with torch.inference_mode(False):
        on_host = torch.tensor(numbers, dtype=dtype)
        return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


@lru_cache(maxsize=1024)
def addresses(numbers: tuple[object, ...], device: torch.device) -> Tensor:
    """Return buffer addresses (and other numbers) as an int64 tensor on `device`; cached, as buffers seldom change."""
    return upload(numbers, torch.int64, device)
