"""The bill: the bytes that a cache actually holds, by part, counted the same way for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.state_layer import StateLayer


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
        """Add bytes to one of the parts, by its name."""
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
        """Compression ratio: bytes of a cache in the model's own dtype divided by used bytes; NaN if none are used."""
        return self.fp16_equivalent * self.width / 2 / self.used.total if self.used.total else float("nan")

    def add(self, draft: Bill) -> None:
        """Add the bytes of a draft's own cache, which an unquantized cache would not have."""
        for parts, others in ((self.used, draft.used), (self.reserved, draft.reserved)):
            for part, count in asdict(others).items():
                parts.add(part, count)

    def as_dict(self) -> dict[str, object]:
        """Return the bill as nested dictionaries of numbers, the form in ``metrics.json``; `width` is left out."""
        return {
            "used": self.used.as_dict(),
            "reserved": self.reserved.as_dict(),
            "fp16_equivalent": self.fp16_equivalent,
        }


def count_bytes(layers: Sequence[KVLayer], state_layers: Sequence[StateLayer], row: int | None = None) -> Bill:
    """Return how many bytes the layers of a cache take, by part; the arguments are as for :meth:`KVCache.bill`."""
    used, reserved, equivalent = Parts(), Parts(), 0
    initialized = [layer for layer in layers if layer.is_initialized]
    for layer in initialized:
        rows: Sequence[int] = range(layer.batch) if row is None else [row]
        for segment in layer.segments():
            for part, buffer in segment.buffers():
                reserved.add(part, buffer.untyped_storage().nbytes())
            for r in rows:
                for part, count in segment.used(r).items():
                    used.add(part, count)
        for r in rows:
            equivalent += 2 * layer.heads * layer.visible_tokens(r) * (layer.key_dim + layer.value_dim)
    for state in (x for state_layer in state_layers for x in state_layer.states()):
        reserved.add("state", state.untyped_storage().nbytes())
        used.add("state", state.nbytes if row is None else state[row].nbytes)
    width = max((layer.dtype.itemsize for layer in initialized), default=2)
    return Bill(used, reserved, equivalent + used.state * 2 // width, width)
