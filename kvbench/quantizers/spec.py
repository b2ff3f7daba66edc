"""Specifications of quantizers (`conf/quantizer/*.yaml`): packed formats of keys and values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.util.confdir import group_options, read_choice

#: separator of a preset's name and the changes to it
CHANGED = "+"

Axis = Literal["channel", "token"]
Side = Literal["key", "value"]

#: optional fields of a format
_DEFAULTS = {"kind": "affine"}

#: bit widths that packed storage supports (exactly bits/8 bytes per element), and for each the widths of the planes in
#: which a code is stored: 1, 2 or 4 bits, the most significant ones first (:mod:`kvbench.quantizers.packing`)
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
#: smallest group, in channels, to which a default is reduced to fit a head
LEAST_GROUP = 8


def fitting(most: int, head_dim: int) -> int | None:
    """Find a group size for a head: the largest power of two that is at most `most` and divides `head_dim`.

    For example, with `most` 64: 16 for heads of 80 channels, and 32 for 96. None if it would be below 8.
    """
    group = 1 << (most.bit_length() - 1)
    while group >= LEAST_GROUP and head_dim % group:
        group //= 2
    return group if group >= LEAST_GROUP else None


def preset_name(name: str) -> str:
    """Return the preset's name without the changes to it: ``int2`` for ``int2+key.group_size=64``."""
    return name.partition(CHANGED)[0]


def describe_formats(name: str, formats: Mapping[str, Any], standard: Mapping[str, Any] | None) -> str:
    """Name packed formats by their preset and by what differs from it, for example ``int2+key.group_size=64``.

    If nothing differs, the result is the preset's name alone.

    Args:
        formats: the configured formats, ``{"key": {...}, "value": {...}}``.
        standard: the preset's formats, in the same form. None: no preset has this name, and `name` is returned
            unchanged.
    """
    if standard is None:
        return name
    changes = []
    for side in ("key", "value"):
        given, usual = (dict(group.get(side) or {}) for group in (formats, standard))
        for part in (*usual, *(extra for extra in given if extra not in usual)):
            if given.get(part, _DEFAULTS.get(part)) != usual.get(part, _DEFAULTS.get(part)):
                changes.append(f"{side}.{part}={given.get(part)}")
    return preset_name(name) + (CHANGED + ",".join(changes) if changes else "")


def taken(takes: Sequence[str], extra: Path | None = None) -> tuple[str, ...]:
    """Return the names of the presets that a method takes: those in `takes`, and all presets of the kinds in `takes`.

    Args:
        takes: names of presets, ``none``, and kinds of codes. ``affine`` stands for each preset whose keys and values
            are affine, so that a preset added to the folder is taken without being listed.
        extra: the folder of ``--config-dir``.
    """
    kinds = {name: kind_of(read_choice(path)) for name, path in group_options("quantizer", extra).items()}
    named = [name for name in takes if name not in kinds.values()]
    return tuple(dict.fromkeys([*named, *(name for name, kind in kinds.items() if kind in takes)]))


def kind_of(formats: Mapping[str, Any]) -> str:
    """Return the kind of the codes of ``{"key": {...}, "value": {...}}``; empty if there are two kinds, or no codes."""
    kinds = {(formats.get(side) or {}).get("kind", _DEFAULTS["kind"]) for side in ("key", "value") if side in formats}
    return kinds.pop() if len(kinds) == 1 else ""


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """The packed format of keys or of values: bits per code, and how elements are grouped.

    Args:
        bits: bits per code, one of :data:`PLANES`.
        group_size: number of elements that share a scale and a minimum; ``"head_dim"`` (axis ``token`` only): all
            channels of a head.
        axis: direction in which groups are formed. ``"channel"``: a group consists of consecutive tokens of the same
            channel (KIVI's keys); ``"token"``: of consecutive channels of the same token (KIVI's values).
        kind: structure of a code. ``"affine"``: a number from 0 to 2**bits - 1; ``"hierarchical"``: two nibbles, of
            which a draft model reads only the upper one (QuantSpec).
        default: True if `group_size` is a preset's, not the user's. A preset's group size may be reduced to fit the
            model's heads (:meth:`channels_per_group`); a user's that does not fit is an error.
    """

    bits: int
    group_size: int | Literal["head_dim"]
    axis: Axis
    kind: Literal["affine", "hierarchical"] = "affine"
    default: bool = field(default=False, compare=False, repr=False)

    def check(self, key: str) -> None:
        """Raise ConfigError if bits, group size, axis and kind are not a format that the cache can store."""
        if self.bits not in PLANES:
            raise ConfigError(
                f"{key}.bits", self.bits, "codes with this number of bits cannot be stored", allowed=PLANES
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
                    "must be a number, because a group per channel consists of tokens",
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
        """Return the number of channels per group for heads of `head_dim` channels; only for axis ``token``.

        ``"head_dim"`` becomes `head_dim`. A preset's group size that does not divide `head_dim` is reduced to the
        largest smaller power of two that does, if there is one of at least 8. Any other group size is returned
        unchanged.
        """
        if self.group_size == "head_dim":
            return head_dim
        group = int(self.group_size)
        return (fitting(group, head_dim) or group) if self.default and head_dim % group else group


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec:
    """The packed formats of keys and of values.

    Args:
        name: name of the preset in ``conf/quantizer`` (``"int2"``), followed by any changes to it
            (``"int2+key.group_size=64"``).
        key: format of the keys.
        value: format of the values.
    """

    #: incremented when quantizers store something else; part of a run's identity
    version: ClassVar[int] = 1

    name: str
    key: FormatSpec
    value: FormatSpec

    def as_default(self, standard: QuantizerSpec | None) -> QuantizerSpec:
        """Return a copy in which the group sizes taken over from a preset are marked as such (``FormatSpec.default``).

        Only marked group sizes may be reduced to fit the model's heads.

        Args:
            standard: the preset. A group size counts as taken over if it and the axis equal the preset's. None: no
                group size is marked.
        """
        usual = (None, None) if standard is None else (standard.key, standard.value)
        pairs: list[tuple[FormatSpec, FormatSpec | None]] = list(zip((self.key, self.value), usual, strict=True))
        key, value = (
            replace(mine, default=its is not None and (mine.group_size, mine.axis) == (its.group_size, its.axis))
            for mine, its in pairs
        )
        return replace(self, key=key, value=value)

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return the group sizes that were reduced to fit the heads, by ``key.group_size`` or ``value.group_size``."""
        return {
            f"{side}.group_size": form.channels_per_group(head_dim)
            for side, form in (("key", self.key), ("value", self.value))
            if form.axis == "token" and form.group_size not in ("head_dim", form.channels_per_group(head_dim))
        }

    def check(self, prefix: str = "quantizer", head_dim: int | None = None) -> None:
        """Raise ConfigError if the cache cannot store a format, or if its groups do not fit the model's heads.

        Args:
            head_dim: channels per head; None if the model is not known yet, so that only the formats themselves are
                checked.
        """
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
