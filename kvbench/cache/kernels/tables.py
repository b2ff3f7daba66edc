"""Small tables of indices and addresses for kernels, copied to a device without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers, a list that may be nested, to a device without making the host wait until the copy has finished."""
    with torch.inference_mode(False):
        on_host = torch.tensor(numbers, dtype=dtype)
        return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


@lru_cache(maxsize=1024)
def addresses(numbers: tuple[object, ...], device: torch.device) -> Tensor:
    """Return buffer addresses as an int64 tensor on a device; equal arguments return the same, cached tensor.

    `numbers` are addresses and other integers, a tuple that may be nested.
    """
    return upload(numbers, torch.int64, device)
