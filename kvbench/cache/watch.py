"""NaN and Inf among tokens that a kernel packs: noted on the device, reported where the host waits anyway.

The kernel that packs finds NaN and Inf on its way, but an answer to the host at every call would stall the device. It
notes the first place in a record in device memory instead. The host reads the record once a prefill, at the first step
after it (by then it has waited for the first token); when a cache is settled as a whole (``bill()``); and during
decoding from a copy that is made while steps run: an error then shows one or two steps late. Nothing is lost by that,
as the token that held it spoils its own step already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors import NonFiniteError

#: int32 numbers of a record: found, tag, row, head, token, channel
FIELDS = 6


@dataclass(frozen=True)
class Place:
    """The place of a NaN or Inf: row of the batch, KV head, token of the segment, channel."""

    row: int
    head: int
    token: int
    channel: int


#: says in words where a place of one segment is
Words = Callable[[Place], str]


class Watch:
    """The record of one device, for any number of segments.

    Args:
        device: where the segments lie.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.record = torch.zeros(FIELDS, dtype=torch.int32, device=device)
            self._copy = torch.zeros(FIELDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._event: torch.cuda.Event | None = None
        self._words: list[Words] = []
        #: True if a prompt was packed since the host last waited
        self.fresh = False

    def tag(self, words: Words) -> int:
        """Return the number of a segment; `words` makes the message if something is found in it."""
        self._words.append(words)
        return len(self._words) - 1

    def check(self) -> None:
        """Wait for the device.

        Raises:
            NonFiniteError: something was noted.
        """
        self.fresh = False
        self._report(self.record)

    def poll(self) -> None:
        """Look at the copy that an earlier call asked for, if it is here, and ask for another.

        It waits after a prefill only.

        Raises:
            NonFiniteError: something was noted.
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


def words(place: Place) -> str:
    """Return the message for a segment that belongs to no layer."""
    index = (place.row, place.head, place.token, place.channel)
    return f"NaN or Inf at index {index} of a segment"


class Watches:
    """The watches of one cache, one for each device that holds a layer."""

    def __init__(self) -> None:
        self._watches: dict[torch.device, Watch] = {}

    def of(self, device: torch.device) -> Watch:
        """Return the watch of a device, made at first use."""
        if device not in self._watches:
            self._watches[device] = Watch(device)
        return self._watches[device]

    def check(self) -> None:
        """Call :meth:`Watch.check` of every device."""
        for watch in self._watches.values():
            watch.check()

    def poll(self) -> None:
        """Call :meth:`Watch.poll` of every device."""
        for watch in self._watches.values():
            watch.poll()
