"""KVarN: tiles of tokens are rotated and balanced over tokens and channels before they are rounded.

Source: Huawei CSL, "KVarN" (arXiv 2606.03458), with tokens placed as in the authors' contribution to vLLM: the first
128 tokens stay exact, and so do the newest ones until their tile is full; then the whole tile is packed. The parts that
its ablations vary are hyper-parameters: rotation, iterations, sinks, tile, and the bits of keys and values.
``balance=norm`` is OScaR (arXiv 2605.19660).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import SIDES, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.recency import RecencyMethod
from kvbench.quantizers.spec import FormatSpec
from kvbench.rotation.spec import RotationSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer

#: tile lengths of the authors' presets
TILES = (64, 128)
#: bytes of A, Z and C each, which are fp16 whatever the model's dtype
PARAM = 2


@dataclass(kw_only=True)
class Kvarn(RecencyMethod):
    """KVarN: whole tiles of G tokens are packed, with a factor per token and a factor per channel.

    G is the group size of the quantizer's keys. Keys are rounded per channel and values per token, each after a
    division by the other direction's factors, which balance the tile
    (:class:`~kvbench.quantizers.kvarn.KvarnQuantizer`). Keys are stored after RoPE and rotation.

    Args:
        rotation: basis in which heads are stored (as shipped: Hadamard matrices for keys and values).
        sinks: number of first tokens that stay in full precision (as shipped: 128).
        window: number of newest tokens that stay in full precision in addition to an incomplete tile (as shipped: 0).
        balance: how a tile is balanced before it is rounded. ``kvarn``: by the standard deviations of its tokens and
            its channels, in turn; ``norm``: each token is divided by its norm (OScaR); ``none``: not at all.
        iterations: number of rounds of ``balance=kvarn`` (as shipped: 8; the authors see no loss against 16). With 0,
            this is KIVI with whole tiles, or QuaRot's variant of it if keys and values are rotated.
        quantile: share of the smallest and of the largest elements of a row (a key channel of a tile, or a value) that
            are clipped before rounding (as shipped: 0).
    """

    rotation: RotationSpec = field(default_factory=lambda: RotationSpec(key="hadamard", value="hadamard"))
    sinks: int = bounded(128, minimum=0)
    window: int = bounded(0, minimum=0)
    balance: Literal["kvarn", "norm", "none"] = "kvarn"
    iterations: int = bounded(8, minimum=0)
    quantile: float = bounded(0.0, minimum=0.0)

    @property
    def gives_tail(self) -> bool:  # type: ignore[override]
        """True without `window`: a rollback then only shortens an incomplete tile, which is in full precision."""
        return not self.window

    @property
    def tile(self) -> int:
        """G, the number of tokens that are packed together."""
        return int(self.formats()[0].group_size)

    def exact(self, n: int) -> int:
        """Return how many of the newest tokens are in full precision: `window`, and those of an incomplete tile."""
        return n if n <= self.window else self.window + (n - self.window) % self.tile

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return KVarN's quantizer for the keys or the values; `channels` has no effect."""
        from kvbench.quantizers.kvarn import KvarnQuantizer

        form = self.formats()[SIDES.index(side)]
        return KvarnQuantizer(form.bits, self.tile, form.axis, self.balance, self.iterations, self.quantile)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment for the newest tokens, with room for 16 beyond window and tile."""
        if not self._packs(layer):
            return super().exact_segment(layer, side)
        return self.full(layer, side, capacity=self.window + self.tile + 16, slack=16)

    def packed_bytes(self, at: Setting, count: int, form: FormatSpec) -> KVBytes:
        """Return the bytes of `count` packed tokens, a multiple of G, counting only their keys or only their values.

        A tile has two numbers for each row that shares a scale (a channel of keys, or a token of values), and one for
        each line in the other direction (a token of keys, or a channel of values).
        """
        tiles = at.heads * (count // self.tile)
        rows, columns = (at.channels, self.tile) if form.axis == "channel" else (self.tile, at.channels)
        codes = tiles * (-(-self.tile * at.channels * form.bits // 8))
        return KVBytes(codes=codes, scales=tiles * (2 * rows + columns) * PARAM)

    def unit(self, width: int) -> int:
        """Return how many hidden tokens are dropped together on a layer with a sliding window: a tile."""
        return self.tile

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter is out of range, or if :meth:`RecencyMethod.check` fails."""
        super().check(head_dim, max_length)
        if self.balance not in ("kvarn", "norm", "none"):
            raise ConfigError(
                "method.balance", self.balance, "is not a way of balancing a tile", allowed=("kvarn", "norm", "none")
            )
        if self.balance != "kvarn" and self.iterations != Kvarn.iterations:
            raise ConfigError(
                "method.iterations",
                self.iterations,
                f"has no effect with method.balance={self.balance}, which is not repeated",
                hint="leave it out, or set method.balance=kvarn",
            )
        if self.quantile >= 0.5:
            raise ConfigError(
                "method.quantile", self.quantile, "must be a share below one half", allowed="from 0 to below 0.5"
            )

    def check_rule(self) -> None:
        """Raise ConfigError if the formats are not KVarN's, or if :meth:`RecencyMethod.check_rule` fails."""
        key, value = self.formats()
        for side, form, axis in (("key", key, "channel"), ("value", value, "token")):
            if form.axis != axis or form.kind != "affine":
                raise ConfigError(
                    f"quantizer.{side}.axis",
                    form.axis,
                    f"must be {axis}: KVarN rounds keys per channel and values per token",
                    allowed=axis,
                    hint="quantizer=k4v2_g128",
                )
        if key.group_size not in TILES:
            raise ConfigError(
                "quantizer.key.group_size",
                key.group_size,
                "is not the size of a tile: KVarN packs tiles of 64 or 128 tokens, and a group of keys is one tile",
                allowed=TILES,
                hint="quantizer.key.group_size=128",
            )
        if value.group_size != "head_dim":
            raise ConfigError(
                "quantizer.value.group_size",
                value.group_size,
                "must be head_dim, because KVarN has one scale and minimum per value",
                allowed="head_dim",
                hint="quantizer.value.group_size=head_dim",
            )
        super().check_rule()
