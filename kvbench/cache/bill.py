"""The bill: the bytes that a cache really holds, by part, from the same function for every method."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Parts:
    """Bytes by part.

    Args:
        codes: packed codes.
        scales: scales with minima or zero points (and whatever a code needs to be decoded).
        window: tokens in full precision, and single elements of others (KVQuant's outliers).
        index: positions and permutations that lie on the device with the tokens, and the places of such elements.
    """

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.codes + self.scales + self.window + self.index

    def add(self, part: str, count: int) -> None:
        """Add `count` bytes to a part by name."""
        setattr(self, part, getattr(self, part) + count)

    def as_dict(self) -> dict[str, int]:
        """Return ``{"total", "codes", "scales", "window", "index"}``."""
        return {"total": self.total, **asdict(self)}


@dataclass
class Bill:
    """The bytes of a cache.

    Args:
        used: bytes of the tokens that are held: the formulas of each method, to the byte.
        reserved: bytes of the storages of the buffers that hold them.
        fp16_equivalent: 2 bytes an element for every key and value that stock transformers holds of each row: of all
            tokens seen, in a layer with a sliding window of the newest ``window - 1``.
        width: bytes of an element of the model's own dtype.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int
    width: int = 2

    @property
    def ratio(self) -> float:
        """The compression ratio: bytes of method=fp16, in the model's own dtype, over the used bytes."""
        return self.fp16_equivalent * self.width / 2 / self.used.total if self.used.total else float("nan")

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form, as in ``metrics.json``."""
        return {
            "used": self.used.as_dict(),
            "reserved": self.reserved.as_dict(),
            "fp16_equivalent": self.fp16_equivalent,
        }
