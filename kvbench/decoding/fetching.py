"""Copies of new tokens from the device to the host, for which neither waits at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Tokens:
    """Queue of asynchronous copies that bring the tokens of each step from the device to the host.

    The tensor `source` on the device has the newest tokens; every step overwrites it.
    """

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._free: list[Tensor] = []
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fetch(self) -> None:
        """Start copying the newest tokens to the host, after the step that was queued last, without waiting for it."""
        cuda = self.source.is_cuda
        with torch.inference_mode(False):
            room = self._free.pop() if self._free else torch.empty(self.source.shape, dtype=torch.long, pin_memory=cuda)
        room.copy_(self.source, non_blocking=True)
        event = torch.cuda.Event() if cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.source.device))
        self._waiting.append((room, event))

    def wait(self) -> list[int]:
        """Wait until the oldest copy has arrived on the host, and return its tokens, one per row."""
        room, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        self._free.append(room)
        return [int(token) for token in room.flatten().tolist()]
