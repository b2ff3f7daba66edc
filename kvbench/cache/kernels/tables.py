"""Small tables of numbers for kernels: places and addresses, sent to a device without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (nested) list of numbers as a tensor on `device`, in its shape."""
    with torch.inference_mode(False):
        on_host = torch.tensor(numbers, dtype=dtype)
        return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


@lru_cache(maxsize=1024)
def addresses(numbers: tuple[object, ...], device: torch.device) -> Tensor:
    """Return addresses of buffers (and numbers that go with them), int64; sent once, as buffers stay where they are."""
    return upload(numbers, torch.int64, device)
