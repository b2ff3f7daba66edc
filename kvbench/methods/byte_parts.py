"""Bytes of full-precision and packed tokens: the terms of the methods' formulas. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvbench.methods.leaving import hidden
from kvbench.quantizers.spec import FormatSpec

#: which bytes to count: ``all``: everything that the cache holds, a draft's own cache included; ``target``: the same
#: without a draft's own cache; ``draft``: what a drafted token reads
View = Literal["all", "target", "draft"]


@dataclass(frozen=True)
class KVBytes:
    """Bytes of a cache by part: codes, scales, full-precision tokens (``window``), indices and states.

    It has the fields of :class:`kvbench.cache.bill.Parts`, but needs no torch.
    """

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """Sum of the bytes of all parts."""
        return self.codes + self.scales + self.window + self.index + self.state

    def __mul__(self, times: int) -> KVBytes:
        return KVBytes(*(getattr(self, f.name) * times for f in fields(self)))

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Setting:
    """Everything on which the bytes of one sequence in one layer depend: shape of the layer and numbers of tokens.

    Args:
        tokens: number of tokens of the sequence so far, the prompt included.
        width: bytes per element in full precision. Scales and minima have 4 bytes if this is 4, otherwise 2.
        view: what to count (:data:`View`).
        chunks: for Cocktail, the number of INT2 chunks and the number of INT4 chunks; None: they follow from its
            hyper-parameter `split`.
        window: the layer's sliding window, in tokens; None: every token sees all tokens before it.
        widths: for Cocktail, the bits of each chunk (2, 4 or 16) in the order of the text; None: they follow from
            `chunks`.
        layers: number of layers of the model; None if not known.
    """

    tokens: int
    prompt: int
    query_heads: int
    heads: int
    channels: int
    width: int = 2
    layer: int = 0
    view: View = "all"
    chunks: tuple[int, int] | None = None
    window: int | None = None
    widths: tuple[int, ...] | None = None
    layers: int | None = None

    @property
    def hidden(self) -> int:
        """Number of oldest tokens that no later token can see."""
        return hidden(self.tokens, self.window)

    @property
    def shown(self) -> int:
        """Number of prompt tokens that the first token after the prompt can see."""
        return self.prompt - hidden(self.prompt, self.window)

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        return self.tokens - self.prompt

    @property
    def param(self) -> int:
        """Bytes of one scale or one minimum."""
        return 4 if self.width == 4 else 2

    def exact(self, count: int) -> KVBytes:
        """Return the bytes of `count` tokens in full precision, counting only their keys or only their values."""
        return KVBytes(window=self.heads * count * self.channels * self.width)

    def both(self, count: int) -> KVBytes:
        """Return the bytes of `count` tokens in full precision, keys and values together."""
        return self.exact(count) + self.exact(count)

    def packed(self, count: int, form: FormatSpec, block: int | None = None) -> KVBytes:
        """Return the bytes of `count` tokens in a packed format, counting only their keys or only their values.

        Args:
            block: number of tokens that are packed together, if they are then divided into ``ceil(block /
                form.group_size)`` groups of nearly equal size (LogQuant). None: each group is packed separately. Used
                only if groups run along the tokens.
        """
        if form.axis == "channel":
            group = int(form.group_size)
            block = block or group
            params = count // block * -(-block // group) * self.channels
        else:
            params = count * (self.channels // form.channels_per_group(self.channels))
        codes = -(-self.heads * count * self.channels * form.bits // 8)
        return KVBytes(codes=codes, scales=2 * self.heads * params * self.param)
