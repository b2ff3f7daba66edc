"""The schema of ``model.outliers``: channels of keys or values that are made larger without changing outputs. No torch.

:mod:`kvbench.models.make_outliers` says how the weights change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbench.errors import ConfigError

NONE = "none"
#: before the outliers in the name of a model
MARK = " outliers="
#: largest factor, and most pairs of channels per head
MOST_FACTOR, MOST_PAIRS = 65536.0, 64
#: Hydra reads no equals signs in a value
SYNTAX = (
    "NAME:KEY:VALUE..., such as first_last:factor:16; the keys are layers (all, ends or 0+29), pairs, factor and side "
    "(keys or values)"
)
#: option -> the values that it takes
OPTIONS = {
    "side": "side: keys or values",
    "layers": "layers: all, ends, or indices from -4096 to 4095 joined by plus signs, such as 0+-1",
    "pairs": f"pairs: a whole number from 1 to {MOST_PAIRS}",
    "factor": f"factor: a number above 0 and at most {MOST_FACTOR:.0f}",
}


@dataclass(frozen=True)
class Outliers:
    """Channels of keys or values that are made larger, and their factor.

    Args:
        side: ``keys`` or ``values``.
        layers: ``all``, ``ends`` (the first and the last), or indices joined by plus signs; -1 is the last.
        pairs: number of pairs of RoPE channels per KV head, spread evenly over the head. For values, twice as many
            single channels.
        factor: number by which these channels are multiplied.
    """

    side: str
    layers: str
    pairs: int
    factor: float

    def chosen(self, count: int) -> list[int]:
        """Return the indices of the chosen layers of a model with `count` layers; raise ConfigError if it lacks one."""
        if self.layers in ("all", "ends"):
            return list(range(count)) if self.layers == "all" else sorted({0, count - 1})
        places = [int(text) for text in self.layers.split("+")]
        beyond = [place for place in places if not -count <= place < count]
        if beyond:
            names = ", ".join(map(str, beyond))
            raise ConfigError(
                "model.outliers",
                written(self),
                f"names layer{'s' * (len(beyond) > 1)} {names}, which the model lacks",
                allowed=f"layers 0 to {count - 1}, or -{count} to -1 from the last",
                hint="layers are all, ends, or indices joined by plus signs, such as first_last:layers:0+-1",
            )
        return sorted({place % count for place in places})

    def channels(self, rotary: int, count: int) -> list[int]:
        """Return the channels of one head that become larger.

        Args:
            rotary: number of channels to which RoPE is applied; channels of keys are chosen from these. The first
                channel of a pair is in the first half.
            count: number of all channels of a head; channels of values are chosen from all.
        """
        half = (rotary if self.side == "keys" else count) // 2
        if self.pairs > half:
            raise ConfigError(
                "model.outliers",
                written(self),
                f"asks for {self.pairs} pairs of channels, but a head has {half}",
                allowed=f"pairs from 1 to {half}",
                hint=f"set pairs:{half} or fewer",
            )
        firsts = [(2 * pair + 1) * half // (2 * self.pairs) for pair in range(self.pairs)]
        return sorted([*firsts, *(first + half for first in firsts)])


#: by name. The options that a text gives replace these
PRESETS = {
    "keys": Outliers("keys", "all", 2, 64.0),
    "values": Outliers("values", "all", 2, 64.0),
    "first_last": Outliers("keys", "ends", 2, 64.0),
}


def outliers(text: str) -> Outliers | None:
    """Read a value of ``model.outliers``, such as ``first_last`` or ``keys:layers:0+29:factor:16``; None for ``none``.

    Raises:
        ConfigError: the text does not begin with a preset, or an option is wrong.
    """
    name, *options = text.split(":")
    pairs = list(zip(options[::2], options[1::2], strict=False))
    if text == NONE:
        return None
    if name == NONE:
        raise ConfigError(
            "model.outliers", text, "has options, but none has no outliers", hint=f"set none alone, or {SYNTAX}"
        )
    if name not in PRESETS:
        raise ConfigError("model.outliers", text, "is no preset of outliers", allowed=(NONE, *PRESETS), hint=SYNTAX)
    known = PRESETS[name]
    for key, value in pairs:
        if key not in OPTIONS:
            raise ConfigError("model.outliers", text, f"has no option {key}", allowed=tuple(OPTIONS), hint=SYNTAX)
        try:
            known = replace(known, **_option(key, value))
        except ValueError:
            problem = f"has a wrong option: {key}:{value}"
            raise ConfigError("model.outliers", text, problem, allowed=OPTIONS[key], hint=SYNTAX) from None
    if len(options) % 2:
        raise ConfigError("model.outliers", text, f"has an option without a value: {options[-1]}", hint=SYNTAX)
    return known


def _option(key: str, value: str) -> dict[str, Any]:
    """Return ``{key: value}``, the value converted to its type; raise ValueError if key or value is not allowed."""
    if key == "side" and value in ("keys", "values"):
        return {key: value}
    if key == "layers" and (value in ("all", "ends") or all(-4096 <= int(part) < 4096 for part in value.split("+"))):
        return {key: value}
    if key == "pairs" and 1 <= int(value) <= MOST_PAIRS:
        return {key: int(value)}
    if key == "factor" and 0 < float(value) <= MOST_FACTOR:
        return {key: float(value)}
    raise ValueError(key)


def written(chosen: Outliers) -> str:
    """Return the value of ``model.outliers`` with the fewest options that describes `chosen`, however it was typed."""

    def options(preset: Outliers) -> list[str]:
        pairs = [(key, value) for key, value in vars(chosen).items() if value != vars(preset)[key]]
        return [f"{key}:{value:g}" if isinstance(value, float) else f"{key}:{value}" for key, value in pairs]

    name = min(PRESETS, key=lambda name: len(options(PRESETS[name])))
    return ":".join([name, *options(PRESETS[name])])


def named(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration group `model` with its outliers appended to its name, so that every row shows them.

    Raises:
        ConfigError: ``model.outliers`` is wrong.
    """
    chosen = outliers(str(model.get("outliers", NONE)))
    if chosen is None:
        return dict(model)
    text = written(chosen)
    return {**model, "outliers": text, "name": f"{base_name(str(model.get('name')))}{MARK}{text}"}


def base_name(name: str) -> str:
    """Return the name of a model without its outliers."""
    return name.partition(MARK)[0]
