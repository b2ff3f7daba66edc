"""A format per layer: ``method.layers="0-1:fp16,2-29:int4,30-:int8"``. Imports no torch.

Layers differ in how much quantization hurts them (KVTuner, Li et al. 2025, arXiv 2502.04420), and engines keep their
first and last layers exact (vLLM's ``--kv-cache-dtype-skip-layers``). For a layer of the map, the method uses the
quantizer that the map names, or fp16 takes its place; other layers use the method as it is configured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvbench.errors import CombinationError, ConfigError
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.schema import build

#: a map as it is typed: text, a list of its entries, or a mapping of layers to formats
Layers = str | tuple[str, ...] | dict[str, str] | None

#: format of layers in full precision, and the method that serves them (by name: it imports the base of all methods)
EXACT, EXACT_TARGET = "fp16", "kvbench.methods.fp16.FP16"
KEY = "method.layers"
EXAMPLE = "method.layers=[0-1:fp16,2-29:int4,30-:int8]"
_RANGE = re.compile(r"(-?\d+)(?:(-)(-?\d+)?)?")


@dataclass(frozen=True)
class Entry:
    """One entry of a map: consecutive layers, and their format.

    Args:
        first: first layer; negative numbers count from the last layer, which is -1.
        last: last layer, likewise.
        form: ``fp16``, the name of a quantizer preset, or ``KEYS/VALUES`` for two presets.
    """

    first: int
    last: int
    form: str

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{'' if self.last == -1 else self.last}"
        return f"{span}:{self.form}"

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the first layer and the last, counted from 0, in a model of `count` layers."""
        return self.first + (count if self.first < 0 else 0), self.last + (count if self.last < 0 else 0)


def parse_layer_map(layers: Layers) -> tuple[Entry, ...]:
    """Parse a map of formats, as a text or as data; None is a map without entries.

    Raises:
        ConfigError: an entry is not LAYERS:FORMAT, or the text has no entry.
    """
    if layers is None:
        return ()
    if layers in ((), [], {}):
        raise ConfigError(KEY, layers, "names no layer", hint=f"leave it out, or {EXAMPLE}")
    if isinstance(layers, Mapping):
        texts = [f"{span}:{form}" for span, form in layers.items()]
    else:
        texts = layers.split(",") if isinstance(layers, str) else list(layers)
    return tuple(_entry(text.strip()) for text in texts)


def _entry(text: str) -> Entry:
    span, _, form = text.rpartition(":")
    match = _RANGE.fullmatch(span.strip())
    if match is None or not form.strip():
        raise ConfigError(
            KEY,
            text,
            "is not LAYERS:FORMAT",
            allowed="layers such as 3, 2-29, 30- (to the last) or -2- (the last two); a format such as fp16 or int4",
            hint=EXAMPLE,
        )
    first = int(match[1])
    last = first if match[2] is None else -1 if match[3] is None else int(match[3])
    return Entry(first, last, form.strip())


def written(layers: Layers) -> str | None:
    """Return a map as text in its normal form, ``0-1:fp16,2-29:int4,30-:int8``; None if it has no entries."""
    return ",".join(map(str, parse_layer_map(layers))) or None


def forms(layers: Layers, count: int) -> list[str | None]:
    """Return the format that a map names for each of `count` layers; None for a layer that it does not name.

    Raises:
        ConfigError: an entry names no layer, a layer that the model does not have, or one that another entry names too.
    """
    by_layer: list[str | None] = [None] * count
    for entry in parse_layer_map(layers):
        first, last = entry.bounds(count)
        if not (0 <= first < count and 0 <= last < count):
            raise CombinationError(
                KEY,
                entry,
                f"names layers that the model does not have: it has {count}",
                allowed=f"0 to {count - 1}, or -{count} to -1",
                hint=f"{KEY}=[{entry.first}-:{entry.form}]" if 0 <= first < count else "",
            )
        if first > last:
            raise CombinationError(
                KEY,
                entry,
                f"names no layer of a model with {count} layers",
                hint=f"put the smaller number first: {last}-{first}",
            )
        for layer in range(first, last + 1):
            if by_layer[layer] is not None:
                raise CombinationError(
                    KEY,
                    entry,
                    f"names layer {layer}, which already has the format {by_layer[layer]}",
                    hint="name each layer once",
                )
            by_layer[layer] = entry.form
    return by_layer


M = TypeVar("M")


def with_formats(method: M, form: str, takes: Sequence[str]) -> M:
    """Return a copy of a method that stores all layers in one format, without a map of layers.

    Args:
        method: a method with the attributes `quantizer`, `takes` and `layers`.
        form: a quantizer's preset; or two as ``KEYS/VALUES``, one for keys and one for values.
        takes: the presets that the method takes.

    Raises:
        ConfigError: the method does not take a preset.
    """
    known = group_options("quantizer")  # not those of a folder of the user's
    usable = [preset for preset in takes if preset != "none" and preset in known]
    name = type(method).__module__.rpartition(".")[2]
    for preset in dict.fromkeys(form.split("/")):
        if preset in usable and form.count("/") < 2:
            continue
        if not usable:
            raise ConfigError(
                KEY,
                form,
                f"cannot be the format of a layer with method={name}, whose layers are all of its own format or fp16",
                allowed=EXACT,
                hint=f"{KEY}=[0-1:fp16]",
            )
        pair = " (in a pair KEYS/VALUES both sides are packed)" if preset == EXACT else ""
        raise ConfigError(
            KEY, form, f"is not a format that method={name} takes for a layer{pair}", allowed=[EXACT, *usable]
        )
    key, _, value = form.partition("/")
    spec = _quantizer_named(key)
    if value:
        spec = replace(spec, name=form, value=_quantizer_named(value).value)
    twin: Any = copy(method)
    twin.quantizer, twin.takes, twin.layers = spec, (*takes, form), None
    return twin  # type: ignore[no-any-return]


def _quantizer_named(name: str) -> QuantizerSpec:
    data = read_choice(group_options("quantizer")[name])
    spec = build(QuantizerSpec, {key: value for key, value in data.items() if key != "defaults"}, "quantizer")
    return spec.as_default(spec)
