"""Small tables of numbers for kernels: places and addresses, sent to a device without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A (nested) list of numbers on `device`, in its shape."""
    with torch.inference_mode(False):
        made = torch.tensor(numbers, dtype=dtype)
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


@lru_cache(maxsize=1024)
def addresses(found: tuple[object, ...], device: torch.device) -> Tensor:
    """Addresses of buffers (and numbers that go with them), int64; sent once, as buffers stay where they are."""
    return upload(found, torch.int64, device)
