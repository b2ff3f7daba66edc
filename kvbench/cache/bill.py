"""The bill: the bytes that a cache actually holds, by part, counted the same way for every method."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Parts:
    """Bytes by part.

    Args:
        codes: packed codes.
        scales: scales, minima or zero points, and whatever else is needed to decode the codes.
        window: tokens in full precision, and single elements in full precision (KVQuant's outliers).
        index: indices of those single elements, and the scores that tokens carry on the device (H2O).
    """

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.codes + self.scales + self.window + self.index

    def add(self, part: str, count: int) -> None:
        """Add `count` bytes to the part of that name."""
        setattr(self, part, getattr(self, part) + count)

    def as_dict(self) -> dict[str, int]:
        """Return ``{"total", "codes", "scales", "window", "index"}``."""
        return {"total": self.total, **asdict(self)}


@dataclass
class Bill:
    """The bytes of a cache.

    Args:
        used: bytes that the stored tokens need; equal to the method's formula, to the byte.
        reserved: bytes of the allocated buffers, spare room included.
        fp16_equivalent: bytes of the keys and values that stock transformers would hold, at 2 bytes per element: all
            tokens seen, without padding; in a layer with a sliding window, the newest ``window - 1`` of them.
        width: bytes per element of the model's own dtype.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int
    width: int = 2

    @property
    def ratio(self) -> float:
        """The compression ratio: bytes of an exact cache in the model's dtype over the used bytes; NaN if empty."""
        return self.fp16_equivalent * self.width / 2 / self.used.total if self.used.total else float("nan")

    def as_dict(self) -> dict[str, object]:
        """Return the bill as JSON data, as in ``metrics.json``; without `width`."""
        return {
            "used": self.used.as_dict(),
            "reserved": self.reserved.as_dict(),
            "fp16_equivalent": self.fp16_equivalent,
        }
