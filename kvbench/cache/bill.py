"""The bill: the bytes that a cache actually holds, by part, counted the same way for every method."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Parts:
    """Bytes of a cache, divided into parts by what they hold.

    Args:
        codes: packed codes.
        scales: scales, minima or zero points, and everything else that is needed to decode the codes.
        window: tokens in full precision, and single elements in full precision (KVQuant's outliers).
        index: indices of these single elements, and the attention that each token has received so far (H2O).
        state: states of fixed size that hybrid models keep in layers with linear attention, Mamba or a convolution.
            They are transformers' own, and the same for every method.
    """

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.codes + self.scales + self.window + self.index + self.state

    def add(self, part: str, count: int) -> None:
        """Add bytes to one of the parts.

        Args:
            part: ``codes``, ``scales``, ``window``, ``index`` or ``state``.
            count: number of bytes.
        """
        setattr(self, part, getattr(self, part) + count)

    def as_dict(self) -> dict[str, int]:
        """Return a dictionary with the bytes of each part, by name, and their sum as ``total``."""
        return {"total": self.total, **asdict(self)}


@dataclass
class Bill:
    """The bytes that a cache takes, and those of an unquantized cache for comparison.

    Args:
        used: bytes that the stored tokens need, without spare room in buffers. ``Method.layer_bytes``, if the method
            has it, computes the same number without a cache.
        reserved: bytes of the allocated buffers, including spare room.
        fp16_equivalent: bytes that the keys and values would take in stock transformers, at 2 bytes per element.
            Padding is not counted. A layer with a sliding window would keep the newest ``window - 1`` tokens, any other
            layer all tokens seen. The state of a hybrid model's other layers is added as ``used.state * 2 / width``:
            no method changes it, so it takes the same bytes in both caches that the ratio compares.
        width: bytes per element of the model's own dtype.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int
    width: int = 2

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes of a cache in the model's own dtype divided by used bytes; NaN if it is empty."""
        return self.fp16_equivalent * self.width / 2 / self.used.total if self.used.total else float("nan")

    def as_dict(self) -> dict[str, object]:
        """Return the bill as nested dictionaries of numbers, the form in ``metrics.json``; `width` is left out."""
        return {
            "used": self.used.as_dict(),
            "reserved": self.reserved.as_dict(),
            "fp16_equivalent": self.fp16_equivalent,
        }
