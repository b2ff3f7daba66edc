"""Specifications of quantizers (`conf/quantizer/*.yaml`): packed formats of keys and values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from kvbench.errors import ConfigError

#: separator of a preset's name and the changes to it
CHANGED = "+"

Axis = Literal["channel", "token"]

#: optional fields of a format
_DEFAULTS = {"kind": "affine"}

#: bit widths that packed storage supports (exactly bits/8 bytes per element)
STORED_BITS = (2, 3, 4, 8)
#: smallest group, in channels, to which a default is reduced to fit a head
LEAST_GROUP = 8


def fitting(most: int, head_dim: int) -> int | None:
    """Return the largest power of two up to `most` that divides `head_dim` (16 for 80, 32 for 96); None below 8."""
    group = 1 << (most.bit_length() - 1)
    while group >= LEAST_GROUP and head_dim % group:
        group //= 2
    return group if group >= LEAST_GROUP else None


def preset(name: str) -> str:
    """Return the preset that a quantizer's name begins with: ``int2`` for ``int2+key.group_size=64``."""
    return name.partition(CHANGED)[0]


def described(name: str, formats: Mapping[str, Any], standard: Mapping[str, Any] | None) -> str:
    """Return the right name for `formats`: the preset's, followed by the changes to it.

    Args:
        name: as it stands in the configuration.
        formats: ``{"key": {...}, "value": {...}}``.
        standard: the preset's formats; None: no preset has that name, and the name is returned unchanged.
    """
    if standard is None:
        return name
    changes = []
    for side in ("key", "value"):
        given, usual = (dict(group.get(side) or {}) for group in (formats, standard))
        for part in (*usual, *(extra for extra in given if extra not in usual)):
            if given.get(part, _DEFAULTS.get(part)) != usual.get(part, _DEFAULTS.get(part)):
                changes.append(f"{side}.{part}={given.get(part)}")
    return preset(name) + (CHANGED + ",".join(changes) if changes else "")


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One packed format.

    Args:
        bits: width of a code: 2, 3, 4 or 8.
        group_size: elements that share a scale and a minimum; ``"head_dim"`` (axis ``token`` only) is the whole head.
        axis: ``"channel"``: a group is `group_size` consecutive tokens of one channel (KIVI's keys);
            ``"token"``: a group is `group_size` consecutive channels of one token (KIVI's values).
        kind: ``"affine"``, or ``"hierarchical"``: two nibbles, a draft reads the upper one (QuantSpec).
        default: `group_size` comes from a preset, not from the user: if it does not divide the head (axis ``token``),
            the largest power of two below it that does is used.
    """

    bits: int
    group_size: int | Literal["head_dim"]
    axis: Axis
    kind: Literal["affine", "hierarchical"] = "affine"
    default: bool = field(default=False, compare=False, repr=False)

    def check(self, key: str) -> None:
        """Raise ConfigError if this format cannot be stored; `key` is the dotted prefix for the message."""
        if self.bits not in STORED_BITS:
            raise ConfigError(
                f"{key}.bits", self.bits, "codes with this number of bits cannot be stored", allowed=STORED_BITS
            )
        if self.kind == "hierarchical" and self.bits != 8:
            raise ConfigError(
                f"{key}.bits", self.bits, "must be 8, because a hierarchical code consists of two nibbles", allowed="8"
            )
        if self.axis not in ("channel", "token"):
            raise ConfigError(f"{key}.axis", self.axis, "is not a known axis", allowed=("channel", "token"))
        if self.group_size == "head_dim":
            if self.axis == "channel":
                raise ConfigError(
                    f"{key}.group_size",
                    "head_dim",
                    "must be a number of tokens for groups per channel",
                    allowed="1 or greater, such as 64",
                )
        elif not isinstance(self.group_size, int) or isinstance(self.group_size, bool) or self.group_size < 1:
            more = " or head_dim" if self.axis == "token" else ""
            raise ConfigError(
                f"{key}.group_size",
                self.group_size,
                f"must be a positive integer{more}",
                allowed=f"1 or greater, such as 64{more and ',' + more}",
            )

    def channels_per_group(self, head_dim: int) -> int:
        """Return how many channels share a scale (axis ``token``); resolve ``"head_dim"``, make a default fit."""
        if self.group_size == "head_dim":
            return head_dim
        group = int(self.group_size)
        return (fitting(group, head_dim) or group) if self.default and head_dim % group else group


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec:
    """The packed formats of keys and of values; `name` is the preset's file name (``"int2"``)."""

    #: incremented when quantizers store something else; part of a run's identity
    version: ClassVar[int] = 1

    name: str
    key: FormatSpec
    value: FormatSpec

    def as_default(self, standard: QuantizerSpec | None) -> QuantizerSpec:
        """Return these formats, group sizes equal to those of the preset `standard` (or None) marked as defaults."""
        usual = (None, None) if standard is None else (standard.key, standard.value)
        pairs: list[tuple[FormatSpec, FormatSpec | None]] = list(zip((self.key, self.value), usual, strict=True))
        key, value = (
            replace(mine, default=its is not None and (mine.group_size, mine.axis) == (its.group_size, its.axis))
            for mine, its in pairs
        )
        return replace(self, key=key, value=value)

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return the group sizes that replace defaults for this head, by ``side.group_size``; empty: all stay."""
        return {
            f"{side}.group_size": form.channels_per_group(head_dim)
            for side, form in (("key", self.key), ("value", self.value))
            if form.axis == "token" and form.group_size not in ("head_dim", form.channels_per_group(head_dim))
        }

    def check(self, prefix: str = "quantizer", head_dim: int | None = None) -> None:
        """Raise ConfigError if a width or group cannot be stored, or a group does not divide a known `head_dim`."""
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
