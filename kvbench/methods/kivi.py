"""KIVI: keys per channel, values per token, the newest tokens in full precision.

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024), sec. 3 and Algorithm 1;
the state after each step is that of the authors' code (jy-yuan/KIVI, models/llama_kivi.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import SIDES, Reach, Side
from kvbench.methods.recency import RecencyMethod
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class Kivi(RecencyMethod):
    """KIVI: keys are quantized per channel, values per token, and the newest tokens stay in full precision.

    When R keys are in full precision, all of them are packed at once, in whole groups. Values are packed one by one.
    Keys are stored after RoPE.

    Args:
        residual: R, the length of the full-precision window in tokens; a multiple of the group size G of the keys
            (paper: 128, or 32 in its settings with R = G = 32).
        sinks: number of first tokens that stay in full precision (0 in KIVI; 2 in LogQuant's Table 1).
        window: number of newest tokens that always stay in full precision (0 in KIVI). If it is not 0, up to R - 1 keys
            before these tokens are in full precision too, but, apart from the sinks, no other values. Serves
            comparisons of methods with equal windows.
        key_axis: elements of a group of keys. ``channel``: consecutive tokens of one channel (KIVI); ``token``:
            consecutive channels of one token, as for values (ablation).
        evict: True: drop the tokens that would otherwise be quantized, so that only the sinks and the newest R tokens
            remain (for comparison; LogQuant's Table 4).
    """

    residual: int = bounded(128, minimum=1)
    sinks: int = bounded(0, minimum=0)
    window: int = bounded(0, minimum=0)
    key_axis: Literal["channel", "token"] = "channel"
    evict: bool = False

    @property
    def gives_tail(self) -> bool:  # type: ignore[override]
        """True without `window` and `evict`; with either, a rollback would need keys that newer ones pushed out."""
        return not (self.window or self.evict)

    def exact(self, n: int) -> int | tuple[int, int]:
        """Return how many of the newest keys and values are in full precision after `n` tokens.

        Returns:
            A pair: n mod R keys and min(n, R) values. If values are grouped per channel
            (``quantizer.value.axis=channel``, an ablation), n mod R values too. With `evict`, one number for both:
            min(n, R). With W tokens in `window`: W + (n - W) mod R keys and min(n, W) values.
        """
        if self.evict:
            return min(n, self.residual)
        behind = max(n - self.window, 0)
        keys = n - behind + behind % self.residual
        if self.formats()[1].axis == "channel":
            return keys, keys
        return keys, min(n, self.window or self.residual)

    def formats(self) -> tuple[FormatSpec, FormatSpec]:
        """Return the packed formats of keys and of values, with the keys grouped along `key_axis`."""
        key, value = super().formats()
        if self.key_axis == "token" and key.axis == "channel":
            key = replace(value if value.axis == "token" else replace(key, axis="token"), bits=key.bits)
        return key, value

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment for the window, with room for 16 tokens beyond it."""
        return self.full(layer, side, capacity=self.window + self.residual + 16, slack=16)

    def reach(self) -> Reach:
        """Return the largest number of tokens that are all kept in full precision.

        It is sinks + R - 1, because keys are packed as soon as the window holds R of them; with `evict` sinks + R; with
        `window` sinks + window, as values are packed one by one.
        """
        if self.window:
            return Reach("method.window", self.window, self.sinks + self.window)
        return Reach("method.residual", self.residual, self.sinks + self.residual - (not self.evict))

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `residual` is below 1 or `window` negative, or if :meth:`RecencyMethod.check` fails."""
        super().check(head_dim, max_length)
        if self.window and self.evict:
            raise ConfigError(
                "method.window",
                self.window,
                "has no meaning with method.evict=true, which keeps the newest R tokens",
                hint=f"method.residual={self.window}",
            )

    def check_rule(self) -> None:
        """Raise ConfigError if `residual` is not a multiple of the group size of a format grouped per channel."""
        for side, form in zip(SIDES, self.formats(), strict=True):
            if form.axis == "channel" and self.residual % int(form.group_size):
                raise ConfigError(
                    "method.residual",
                    self.residual,
                    f"must be a multiple of the {side} group, quantizer.{side}.group_size={form.group_size}",
                    allowed=", ".join(str(int(form.group_size) * i) for i in (1, 2, 4)) + ", ...",
                )
        super().check_rule()
