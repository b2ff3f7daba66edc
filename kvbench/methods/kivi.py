"""KIVI: keys per channel, values per token, the newest tokens in full precision.

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024), sec. 3 and Algorithm 1;
the state after each step is that of the authors' code (jy-yuan/KIVI, models/llama_kivi.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Method, Reach, Side, affine
from kvbench.methods.sliding import CHUNK, whole
from kvbench.quantizers.spec import FormatSpec

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class Kivi(Method):
    """KIVI over keys after RoPE.

    After n tokens (sinks apart) the newest ``n mod residual`` keys and ``min(n, residual)`` values are exact: keys
    leave the window all at once when it is full, in whole groups; values one by one. A step sees its own tokens exact.
    On a layer with a sliding window the rule is that of the whole text; what is hidden is dropped, sinks included, in
    groups of keys (token-wise codes: 32 tokens at a time).

    Args:
        residual: R, window of exact tokens; a multiple of the key group (paper: 128; R = G = 32 in its small settings).
        sinks: first tokens kept exact (0 in KIVI; LogQuant's Table 1 sets 2).
        key_axis: ``channel`` (KIVI) or ``token`` (ablation: keys grouped like values).
        evict: drop what would be quantized and keep the newest R keys and values (LogQuant's Table 4: the eviction
            twin; keys and values must then be of the same tokens).
    """

    rolls: ClassVar[bool] = True
    gives_tail: ClassVar[bool] = True
    needs_quantizer: ClassVar[bool] = True
    residual: int = 128
    sinks: int = 0
    key_axis: Literal["channel", "token"] = "channel"
    evict: bool = False

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Residual positive and a multiple of the key group, sinks not negative."""
        if self.sinks < 0:
            raise ConfigError("method.sinks", self.sinks, "must not be negative", allowed="0, 1, 2, 4, ...")
        if self.residual < 1:
            raise ConfigError("method.residual", self.residual, "must be positive", allowed="32, 64, 128, ...")
        super().check(head_dim, max_length)
        assert self.quantizer is not None
        for side, form in zip(("key", "value"), self.formats(), strict=True):
            group = form.group_size
            if form.axis == "channel" and self.residual % int(group):
                raise ConfigError(
                    "method.residual",
                    self.residual,
                    f"must be a multiple of the {side} group, quantizer.{side}.group_size={group}",
                    allowed=", ".join(str(int(group) * i) for i in (1, 2, 4)) + ", ...",
                )
        if head_dim:
            replace(self.quantizer, key=self.formats()[0]).check("quantizer", head_dim)

    def reach(self) -> Reach:
        """Sinks and window; keys leave it when it is full, values (and evicted tokens) one later."""
        full = self.sinks + self.residual
        return Reach("method.residual", self.residual, full if self.evict else full - 1)

    def formats(self) -> tuple[FormatSpec, FormatSpec]:
        """Formats of keys and values, with `key_axis` applied."""
        assert self.quantizer is not None
        key = self.quantizer.key
        if self.key_axis == "token" and key.axis == "channel":
            key = self.quantizer.value if self.quantizer.value.axis == "token" else replace(key, axis="token")
            key = replace(key, bits=self.quantizer.key.bits)
        return key, self.quantizer.value

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Sinks, packed tokens, window."""
        key, value = self.formats()
        room, channels = (
            max(layer.expected_length() - self.sinks, 0),
            layer.key_dim if side == "key" else layer.value_dim,
        )
        made = [self.full(layer, side, capacity=self.sinks)] if self.sinks else []
        if not self.evict:
            made.append(self.packed(layer, side, affine(key if side == "key" else value, channels), capacity=room))
        return [*made, self.full(layer, side, capacity=self.residual + 16, slack=16)]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Sinks exact; of the rest, all but the newest n mod R keys and all but the newest R values packed."""
        count = layer.real_tokens(rows.indices(layer.batch)[0])
        for store, x, window in zip(layer.stores(), (keys, values), self.windows(count), strict=True):
            sinks = max(self.sinks - (count - x.shape[2]), 0)
            sinks = min(sinks, x.shape[2])
            exact = min(window, x.shape[2] - sinks)
            border = x.shape[2] - exact
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            if not self.evict:
                store.packed.append(rows, x[:, :, sinks:border])
            store.tail.append(rows, x[:, :, border:])

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Pack what stands before the windows of :meth:`windows`."""
        count = layer.real_tokens(rows.indices(layer.batch)[0])
        for store, exact in zip(layer.stores(), self.windows(count), strict=True):
            tail = store.tail
            if self.sinks:
                store.fill_sinks(rows, self.sinks, count)
            excess = tail.length(rows) - exact
            if excess > 0:
                if not self.evict:
                    store.packed.append(rows, tail.view(rows)[:, :, :excess])
                tail.drop_front(rows, excess)

    def unit(self) -> int:
        """Tokens that leave a layer with a sliding window together."""
        if self.evict:
            return 1
        groups = [int(form.group_size) if form.axis == "channel" else 1 for form in self.formats()]
        return lcm(*groups) if max(groups) > 1 else CHUNK

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Sinks, all of them together, and whole groups of keys."""
        return whole(hidden, self.unit(), self.sinks)

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """As the base; the eviction twin has a gap behind its sinks."""
        if not self.evict:
            super().forget(layer, rows, hidden)
            return
        count = layer.hidden_slots(rows.indices(layer.batch)[0], self.forgotten(layer, hidden))
        for store in layer.stores():
            store.drop_front(rows, count)

    def windows(self, count: int) -> tuple[int, int]:
        """Exact keys and exact values of the window after `count` tokens, sinks left out.

        Values per channel (``quantizer.value.axis=channel``, an ablation) leave in whole groups too, as keys do.
        """
        n = max(count - self.sinks, 0)
        recent = min(n, self.residual)
        if self.evict:
            return recent, recent
        return n % self.residual, n % self.residual if self.formats()[1].axis == "channel" else recent

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """In order; without the evicted ones."""
        if not self.evict:
            return None
        import torch

        store, one, n = layer.stores()[0], slice(row, row + 1), layer.real_tokens(row)
        sinks = store.segments[0].length(one) if self.sinks else 0
        kept = torch.cat([torch.arange(sinks), torch.arange(n - store.tail.length(one), n)])
        return kept + layer.start(row)
