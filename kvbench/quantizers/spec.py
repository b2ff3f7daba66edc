"""What a `conf/quantizer/*.yaml` says, as data: the packed format of keys and of values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.errors import ConfigError

Axis = Literal["channel", "token"]

#: bit widths that packed storage exists for (exactly bits/8 bytes an element)
STORED_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One packed format.

    Args:
        bits: width of a code: 2, 3, 4 or 8.
        group_size: elements that share a scale and a minimum; ``"head_dim"`` (axis ``token`` only) is the whole head.
        axis: ``"channel"``: a group is `group_size` consecutive tokens of one channel (KIVI's keys);
            ``"token"``: a group is `group_size` consecutive channels of one token (KIVI's values).
        kind: ``"affine"``, or ``"hierarchical"``: two nibbles, a draft reads the upper one (QuantSpec).
    """

    bits: int
    group_size: int | Literal["head_dim"]
    axis: Axis
    kind: Literal["affine", "hierarchical"] = "affine"

    def check(self, key: str) -> None:
        """Raise ConfigError when no storage exists for this format; `key` is the dotted prefix for the message."""
        if self.bits not in STORED_BITS:
            raise ConfigError(f"{key}.bits", self.bits, "no storage exists for this width", allowed=STORED_BITS)
        if self.kind == "hierarchical" and self.bits != 8:
            raise ConfigError(f"{key}.bits", self.bits, "a hierarchical code is two nibbles", allowed="8")
        if self.axis not in ("channel", "token"):
            raise ConfigError(f"{key}.axis", self.axis, "unknown axis", allowed=("channel", "token"))
        if self.group_size == "head_dim":
            if self.axis == "channel":
                raise ConfigError(
                    f"{key}.group_size", "head_dim", "a per-channel group counts tokens", allowed="32, 64, 128, ..."
                )
        elif not isinstance(self.group_size, int) or isinstance(self.group_size, bool) or self.group_size < 1:
            raise ConfigError(
                f"{key}.group_size", self.group_size, "must be a positive integer or head_dim", allowed="32, 64, 128"
            )

    def channels_per_group(self, head_dim: int) -> int:
        """Channels that share a scale (axis ``token``), with ``"head_dim"`` resolved."""
        return head_dim if self.group_size == "head_dim" else int(self.group_size)


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec:
    """The packed formats of keys and of values; `name` is the preset's file name (``"int2"``)."""

    name: str
    key: FormatSpec
    value: FormatSpec

    def check(self, prefix: str = "quantizer", head_dim: int | None = None) -> None:
        """Raise ConfigError for widths or groups that cannot be stored, or (head_dim known) do not divide the head."""
        for side, fmt in (("key", self.key), ("value", self.value)):
            fmt.check(f"{prefix}.{side}")
            if head_dim and fmt.axis == "token" and head_dim % fmt.channels_per_group(head_dim):
                divisors = [g for g in (8, 16, 32, 64, 128, 256) if head_dim % g == 0]
                raise ConfigError(
                    f"{prefix}.{side}.group_size",
                    fmt.group_size,
                    f"does not divide the model's head_dim {head_dim}",
                    allowed=[*divisors, "head_dim"],
                    hint=f"{prefix}.{side}.group_size={divisors[-1] if divisors else 'head_dim'}",
                )
