"""Tokens in the format of transformers' ``QuantizedCache``: whole tensors, quantized by quanto, hqq or in fp8.

The bytes counted are those of the library's own tensors. As in transformers, reading dequantizes all tokens and, except
in fp8, appending quantizes all of them again; the method :mod:`kvbench.methods.hf_quantized` exists to measure this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.cache.segments.base import Segment
from kvbench.errors import CacheError

if TYPE_CHECKING:
    from transformers.cache_utils import BaseQuantizedLayer


class HFSegment(Segment):
    """The keys or the values of a layer, quantized with transformers' own quantizers (quanto or hqq).

    Each row of the batch is one quantized object of the library. The first arguments are those of
    :class:`~kvbench.cache.segments.interface.Segment`.

    Args:
        backend: a ``QuantizedLayer`` of transformers, whose ``_quantize`` and ``_dequantize`` are used.
        axis: the library's ``axis`` argument (0 or -1 for quanto, 0 or 1 for hqq).
        multiple: tokens are padded to a multiple of this number, with copies of the last one, before they are
            quantized. hqq needs this to pack its codes. No group spans two tokens then, so other tokens' codes do not
            change.
    """

    packed = False  # only readable as a whole, so kernels get no codes of it

    def __init__(
        self,
        batch: int,
        heads: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        backend: BaseQuantizedLayer,
        axis: int,
        multiple: int = 1,
    ) -> None:
        super().__init__(batch, heads, channels, dtype, device)
        self.backend, self.axis, self.multiple = backend, axis, multiple
        self.rows: list[Any] = [None] * batch

    def append(self, rows: slice, x: Tensor) -> None:
        """Append tokens to some rows: dequantize the stored ones, add the new ones, and quantize all of them again.

        Raises:
            CacheError: the backend cannot quantize this number of tokens. With ``axis=-1``, quanto divides the elements
                of each channel, over all heads and tokens, into groups, so the group size must divide heads x tokens.
        """
        for number, row in enumerate(range(*rows.indices(len(self.rows)))):
            new = x[number : number + 1]
            if not new.shape[2]:
                continue
            quantized = self.rows[row]
            if quantized is not None:
                past = self.backend._dequantize(quantized)[:, :, : self.lengths[row]].to(self.dtype)
                new = torch.cat([past, new], 2)
            self.lengths[row] = new.shape[2]
            filling = new[:, :, -1:].expand(-1, -1, -new.shape[2] % self.multiple, -1)
            try:
                self.rows[row] = self.backend._quantize(torch.cat([new, filling], 2).contiguous(), axis=self.axis)
            except ValueError as error:
                raise CacheError(
                    f"transformers' quantizer cannot take {new.shape[2]} tokens of {new.shape[1]} heads along axis "
                    f"{self.axis}: {error}.\n  hint: set method.axis_key=0 method.axis_value=0"
                ) from error

    def read(self, rows: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Segment.read`."""
        parts = [self.backend._dequantize(quantized)[:, :, start:stop] for quantized in self.rows[rows]]
        return torch.cat(parts).to(dtype)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the tensors inside the quantized objects of all rows, as :func:`tensors` names them."""
        return [item for quantized in self.rows if quantized is not None for item in tensors(quantized)]

    def used(self, row: int) -> dict[str, int]:
        """See :meth:`Segment.used`."""
        used = {"codes": 0, "scales": 0}
        for part, tensor in tensors(self.rows[row]) if self.rows[row] is not None else ():
            used[part] += tensor.numel() * tensor.element_size()
        return used

    def map_buffers(self, change: Callable[[Tensor], Tensor]) -> None:
        """Do nothing. Quantized tensors are never written in place, so copies of the segment may share them."""

    def select(self, index: Tensor) -> None:
        """See :meth:`Segment.select`."""
        order = index.tolist()
        self.rows = [self.rows[i] for i in order]
        self.lengths = [self.lengths[i] for i in order]

    def clone(self) -> HFSegment:
        """Return an independent copy; both share the quantized tensors, which are never written in place."""
        twin = super().clone()
        assert isinstance(twin, HFSegment)
        twin.rows = list(self.rows)
        return twin


class Fp8Segment(HFSegment):
    """The keys or the values of a layer in transformers' fp8 format: one scale per row, taken from its first tokens.

    The arguments are those of :class:`HFSegment`; `axis` is not used.
    """

    def append(self, rows: slice, x: Tensor) -> None:
        """Quantize tokens and append them to some rows, with the scale of the tokens that a row already has."""
        quantize: Any = self.backend._quantize  # with a scale, which the libraries' does not have
        for number, row in enumerate(range(*rows.indices(len(self.rows)))):
            new, known = x[number : number + 1], self.rows[row]
            if not new.shape[2]:
                continue
            if known is None:
                self.rows[row] = quantize(new)
            else:
                codes, scale = known
                self.rows[row] = torch.cat([codes, quantize(new, scale)[0]], 2), scale
            self.lengths[row] += new.shape[2]

    def drop_back(self, row: int, count: int) -> None:
        """See :meth:`Segment.drop_back`."""
        codes, scale = self.rows[row]
        self.lengths[row] -= count
        self.rows[row] = codes[:, :, : self.lengths[row]].clone(), scale


def tensors(quantized: Any) -> list[tuple[str, Tensor]]:
    """Return the torch tensors inside a quantized object of quanto, hqq or fp8 as pairs (category, tensor).

    The category is ``codes`` for packed codes, and ``scales`` for scales and zero points or shifts.
    """
    if isinstance(quantized, tuple):  # hqq: packed weights and a dict of parameters; fp8: codes and a scale
        codes, meta = quantized
        if isinstance(meta, Tensor):
            return [("codes", codes), ("scales", meta)]
        return [("codes", codes), *(("scales", meta[name]) for name in ("scale", "zero"))]
    return [("codes", quantized._data._data), ("scales", quantized._scale), ("scales", quantized._shift)]
