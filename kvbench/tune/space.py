"""Recipes, a format for the keys and one for the values of each layer, and the formats that they choose from.

A format is ``fp16`` or one of :mod:`kvbench.quantizers.engine`; a layer's form is one format, or ``KEYS/VALUES``. Keys
and values of a layer are both exact or both packed, as ``method.layers`` has it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigError, nearest
from kvbench.methods.layer_map import EXACT
from kvbench.quantizers.engine.formats import FORMATS, Layout

#: the form of each position of a space
Recipe = tuple[str, ...]
#: formats by default: exact, and one for each size from 4 to 8.5 bits; where several have a size, the one that lost
#: least on a trained model (results/smollm2/kl)
DEFAULT = (EXACT, "q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "octave_k3v3")


def sides_of(form: str) -> tuple[str, str]:
    """Return the formats of keys and of values that a layer's form names."""
    key, _, value = form.partition("/")
    return key, value or key


def form_of(keys: str, values: str) -> str:
    """Return the form of a layer, in its shortest spelling."""
    return keys if keys == values else f"{keys}/{values}"


def layer_map(recipe: Sequence[str]) -> str:
    """Return a recipe of single layers as the value of ``method.layers``: ``0:q8_0,1-29:q8_0/iq4_nl``."""
    entries, first = [], 0
    for form, run in groupby(recipe):
        last = first + len(list(run)) - 1
        entries.append(f"{first}:{form}" if first == last else f"{first}-{last}:{form}")
        first = last + 1
    return ",".join(entries)


@dataclass(frozen=True)
class Space:
    """The recipes that a search may choose.

    Args:
        heads: KV heads of each layer; layers weigh as much as they store.
        channels: channels of a head.
        rope: first channels of a head to which RoPE is applied (octave's bytes depend on it).
        formats: names of the formats.
        tied: number of consecutive layers that each position of a recipe stands for, with their sum that of the layers.

    Raises:
        ConfigError: a format is unknown, or does not fit the heads.
    """

    heads: tuple[int, ...]
    channels: int
    rope: int
    formats: tuple[str, ...]
    tied: tuple[int, ...]

    def __post_init__(self) -> None:
        check_formats(self.formats)
        for name in self.formats:
            if name != EXACT and (reason := FORMATS[name].misfit(self.channels, self.rope)):
                raise ConfigError("--formats", name, reason, hint="leave it out of --formats")

    @property
    def positions(self) -> int:
        """Number of positions of a recipe."""
        return len(self.tied)

    @cached_property
    def single(self) -> tuple[str, ...]:
        """The formats that keys and values may have independently of each other."""
        return tuple(name for name in self.formats if name != EXACT and not FORMATS[name].octave)

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """The forms of a layer, those with the fewest bits first."""
        pairs = [form_of(*pair) for pair in product(self.single, repeat=2)]
        whole = [name for name in self.formats if name not in self.single]
        return tuple(sorted([*pairs, *whole], key=lambda form: (self.form_bits(form), form)))

    def _side_bits(self, form: str) -> tuple[int, int]:
        """Return the bits of a token's key, and of its value, in one head."""
        exact = Layout(16)
        layouts = [
            (exact, exact) if name == EXACT else FORMATS[name].layouts(self.channels, self.rope)
            for name in sides_of(form)
        ]
        chosen = (layouts[0][0], layouts[1][1])
        keys, values = (
            layout.codes(self.channels) + 8 * layout.scales(self.channels) * (form != EXACT) for layout in chosen
        )
        return keys, values

    def form_bits(self, form: str) -> float:
        """Return the bits of an element in a form, keys and values together."""
        return sum(self._side_bits(form)) / (2 * self.channels)

    @cached_property
    def _weights(self) -> list[int]:
        """KV heads of all layers of each position."""
        ends = np.cumsum(self.tied)
        return [sum(self.heads[end - count : end]) for end, count in zip(ends, self.tied, strict=True)]

    @cached_property
    def _unit(self) -> int:
        """Bits of a token that all costs are multiples of."""
        return gcd(*(weight * sum(self._side_bits(form)) for weight in self._weights for form in self.forms))

    @cached_property
    def costs(self) -> NDArray[np.int64]:
        """Whole-number cost of each form at each position, ``[positions, forms]``."""
        bits = [sum(self._side_bits(form)) for form in self.forms]
        return np.array([[weight * each // self._unit for each in bits] for weight in self._weights], dtype=np.int64)

    @property
    def elements(self) -> int:
        """Elements of keys and values that a token has in all layers."""
        return 2 * self.channels * sum(self.heads)

    def capacity(self, bits: float) -> int:
        """Return the largest cost of a recipe of at most `bits` bits an element."""
        return int(np.floor(bits * self.elements / self._unit + 1e-9))

    def cost(self, recipe: Recipe) -> int:
        """Return the cost of a recipe, in units of :attr:`costs`."""
        places = [self.forms.index(form) for form in recipe]
        return int(self.costs[np.arange(self.positions), places].sum())

    def bits(self, recipe: Recipe) -> float:
        """Return the bits of an element of a recipe: codes, scales and all else that is stored of a token."""
        return self.cost(recipe) * self._unit / self.elements

    def uniform(self, form: str) -> Recipe:
        """Return the recipe with one form everywhere."""
        return (form,) * self.positions

    def expand(self, recipe: Recipe) -> Recipe:
        """Return the form of each layer."""
        return tuple(form for form, count in zip(recipe, self.tied, strict=True) for _ in range(count))

    def check_budget(self, bits: float, *, in_bytes: bool = False) -> None:
        """Raise ConfigError if no recipe has so few bits; with `in_bytes`, it names the bytes of a token."""
        if self.capacity(bits) < int(self.costs.min(1).sum()):
            share = self.elements / 8 if in_bytes else 1.0
            option, unit = ("--bytes", "bytes a token") if in_bytes else ("--bits", "bits an element")
            least = f"{share * self.form_bits(self.forms[0]):.10g}"
            raise ConfigError(
                option, round(share * bits, 6), f"is below the smallest format: {self.forms[0]} has {least} {unit}",
                hint=f"{option} {least}, or add a smaller format to --formats",
            )  # fmt: skip


def check_formats(names: Sequence[str]) -> None:
    """Raise ConfigError if a name is not one of a format, or there is none that packs."""
    for name in names:
        if name != EXACT and name not in FORMATS:
            near = nearest(name, [EXACT, *FORMATS])
            raise ConfigError("--formats", name, "is not a format", allowed=[EXACT, *FORMATS],
                              hint=f"did you mean '{near}'?" if near else "")  # fmt: skip
    if all(name == EXACT or FORMATS[name].octave for name in names):
        problem = "names no packed format that keys and values can have apart"
        raise ConfigError("--formats", " ".join(names), problem, hint="--formats fp16 q8_0 iq4_nl")


def tied_layers(layers: int, count: int) -> tuple[int, ...]:
    """Return the sizes of `count` nearly equal runs of consecutive layers."""
    ends = [layers * (i + 1) // count for i in range(count)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
