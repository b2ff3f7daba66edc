"""NaN and Inf in packed tokens: recorded on the device, and reported when the host synchronizes anyway.

The packing kernel notices NaN and Inf at no extra cost, but reporting to the host after every call would stall the
device. Instead it records the first occurrence in device memory. The host reads this record at the first step after a
prefill (when it has already waited for the first token) and when all tokens that are due have been packed (``bill()``).
During decoding it reads an asynchronous copy, so an error is raised one or two steps late. Nothing is lost by the
delay, since the output of the step in which the NaN or Inf arrived was already wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError

#: number of int32 fields of a record: found (0 or 1), tag of the segment, row, head, token, channel
FIELDS = 6


@dataclass(frozen=True)
class Place:
    """The location of a NaN or Inf in a segment; the token is counted within the segment."""

    row: int
    head: int
    token: int
    channel: int


#: turns a place in one segment into an error message
Words = Callable[[Place], str]


class Watch:
    """A record in device memory, in which packing kernels note the first NaN or Inf of the segments that share it."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.record = torch.zeros(FIELDS, dtype=torch.int32, device=device)
            self._copy = torch.zeros(FIELDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._event: torch.cuda.Event | None = None
        self._words: list[Words] = []
        #: True if a prompt was packed since the host last waited
        self.fresh = False

    def tag(self, words: Words) -> int:
        """Register a segment, and return the number by which kernels name it in the record.

        `words` returns the error message for a NaN or Inf at a given :class:`Place` of this segment.
        """
        self._words.append(words)
        return len(self._words) - 1

    def check(self) -> None:
        """Raise NonFiniteError if a NaN or Inf was recorded, after waiting for the device."""
        self.fresh = False
        self._report(self.record)

    def poll(self) -> None:
        """Raise NonFiniteError if a NaN or Inf is already known to be recorded, without waiting for the device.

        Each call reads the copy of the record that an earlier call requested, if it has arrived, and requests the next.
        So an error comes a step or two late. Only the first call after a prefill, and any call on a CPU, reads the
        record itself as :meth:`check` does. While a CUDA graph is captured, nothing is done.
        """
        if self.record.device.type != "cuda" or self.fresh:
            return self.check()
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._event is not None:
            if not self._event.query():
                return None
            self._report(self._copy)
        self._event = self._event or torch.cuda.Event()
        self._copy.copy_(self.record, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self.record.device))
        return None

    def _report(self, record: Tensor) -> None:
        noted, tag, *place = record.tolist()
        if noted:
            self.record.zero_()
            self._event = None
            raise NonFiniteError(self._words[tag](Place(*place)))


def uncached_message(place: Place) -> str:
    """Return the error message for a NaN or Inf in a segment outside a cache, which has no layer to name."""
    index = (place.row, place.head, place.token, place.channel)
    return f"a segment contains NaN or Inf at index {index}"


class Watches:
    """A cache's records of NaN and Inf: one :class:`Watch` for each device that holds a layer."""

    def __init__(self) -> None:
        self._watches: dict[torch.device, Watch] = {}

    def of(self, device: torch.device) -> Watch:
        """Return the :class:`Watch` of a device, creating it at the first call."""
        if device not in self._watches:
            self._watches[device] = Watch(device)
        return self._watches[device]

    def check(self) -> None:
        """Raise NonFiniteError if a NaN or Inf was recorded on any device, after waiting for all of them."""
        for watch in self._watches.values():
            watch.check()

    def poll(self) -> None:
        """Raise NonFiniteError if a NaN or Inf is known to be recorded on any device, as :meth:`Watch.poll` does."""
        for watch in self._watches.values():
            watch.poll()
