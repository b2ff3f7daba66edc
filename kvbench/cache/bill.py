"""The bill: the bytes that a cache actually holds, by part, counted the same way for every method."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Parts:
    """Bytes of a cache, by what they are for.

    Args:
        codes: packed codes.
        scales: scales, minima or zero points, and everything else that is needed to decode the codes.
        window: tokens in full precision, and single elements in full precision (KVQuant's outliers).
        index: indices of these single elements, and scores of tokens that are kept on the device (H2O).
    """

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """The sum of the four parts, in bytes."""
        return self.codes + self.scales + self.window + self.index

    def add(self, part: str, count: int) -> None:
        """Add bytes to one of the four parts.

        Args:
            part: ``codes``, ``scales``, ``window`` or ``index``.
            count: number of bytes.
        """
        setattr(self, part, getattr(self, part) + count)

    def as_dict(self) -> dict[str, int]:
        """Return a dictionary with the bytes of each of the four parts, by name, and their sum as ``total``."""
        return {"total": self.total, **asdict(self)}


@dataclass
class Bill:
    """The bytes that a cache takes.

    Args:
        used: bytes that the stored tokens need. If the method has a formula for its bytes (``Method.layer_bytes``),
            both numbers are equal.
        reserved: bytes of the allocated buffers, including spare room.
        fp16_equivalent: bytes of the keys and values that stock transformers would keep, at 2 bytes per element. It
            keeps all tokens seen, without padding; in a layer with a sliding window, the newest ``window - 1`` of them.
        width: bytes per element of the model's own dtype.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int
    width: int = 2

    @property
    def ratio(self) -> float:
        """The compression ratio: bytes of an unquantized cache divided by used bytes; NaN if the cache is empty."""
        return self.fp16_equivalent * self.width / 2 / self.used.total if self.used.total else float("nan")

    def as_dict(self) -> dict[str, object]:
        """Return the bill as a dictionary of plain numbers, as ``metrics.json`` contains it; `width` is left out."""
        return {
            "used": self.used.as_dict(),
            "reserved": self.reserved.as_dict(),
            "fp16_equivalent": self.fp16_equivalent,
        }
