"""Bytes by part, and what exact and packed tokens cost: what :mod:`kvbench.methods.bytes` adds up. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kvbench.methods.sliding import hidden
from kvbench.quantizers.spec import FormatSpec

#: who reads: ``all``: what the cache holds, a draft's own cache included; ``target``: without that; ``draft``: what a
#: drafted token reads
View = Literal["all", "target", "draft"]


@dataclass(frozen=True)
class KVBytes:
    """Bytes by part, as :class:`kvbench.cache.bill.Parts` has them (which comes with torch)."""

    codes: int = 0
    scales: int = 0
    window: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.codes + self.scales + self.window + self.index

    def __mul__(self, times: int) -> KVBytes:
        return KVBytes(*(getattr(self, f.name) * times for f in fields(self)))

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Setting:
    """One layer of a cache whose bytes a method is asked to predict.

    Args:
        tokens: seen so far by one sequence.
        prompt: of these the prompt's.
        query_heads, heads, channels: Hq, H (KV heads) and D.
        width: bytes of an element in full precision; 4 also makes scales and minima 4 bytes.
        layer: number of the layer.
        view: who reads.
        chunks: Cocktail's INT2 and INT4 chunks, where its `split` does not say; None: see there.
        window: the layer's sliding window; None: every token sees all before it.
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

    @property
    def hidden(self) -> int:
        """Oldest tokens that no later one sees."""
        return hidden(self.tokens, self.window)

    @property
    def shown(self) -> int:
        """Tokens of the prompt that are seen after it."""
        return self.prompt - hidden(self.prompt, self.window)

    @property
    def generated(self) -> int:
        """Tokens after the prompt."""
        return self.tokens - self.prompt

    @property
    def param(self) -> int:
        """Bytes of a scale, or of a minimum."""
        return 4 if self.width == 4 else 2

    def exact(self, count: int) -> KVBytes:
        """So many tokens of one side in full precision."""
        return KVBytes(window=self.heads * count * self.channels * self.width)

    def both(self, count: int) -> KVBytes:
        """So many tokens, keys and values, in full precision."""
        return self.exact(count) + self.exact(count)

    def packed(self, count: int, form: FormatSpec, block: int | None = None) -> KVBytes:
        """So many tokens of one side in a packed format.

        Args:
            block: tokens that are packed together, cut into groups as equal as can be (LogQuant); None: the group.
        """
        if form.axis == "channel":
            group = int(form.group_size)
            block = block or group
            params = count // block * -(-block // group) * self.channels
        else:
            params = count * (self.channels // form.channels_per_group(self.channels))
        codes = -(-self.heads * count * self.channels * form.bits // 8)
        return KVBytes(codes=codes, scales=2 * self.heads * params * self.param)
