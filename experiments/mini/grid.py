"""The settings that are compared on tiny and mini: one line each, as they would be typed."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One row of the comparison.

    Args:
        name: what the tables call it.
        overrides: of the command line.
        family: colour in the plot.
    """

    name: str
    overrides: tuple[str, ...]
    family: str

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def _s(name: str, family: str, overrides: str) -> Setting:
    return Setting(name, tuple(overrides.split()), family)


GRID = (
    _s("fp16", "fp16", "method=fp16"),
    _s("atom 4", "atom", "method=atom quantizer=int4_token"),
    _s("atom 2", "atom", "method=atom quantizer=int2_token"),
    _s("kivi 4", "kivi", "method=kivi quantizer=int4"),
    _s("kivi 3", "kivi", "method=kivi quantizer=int3"),
    _s("kivi 2", "kivi", "method=kivi quantizer=int2"),
    _s("kivi 2, G 64", "kivi", "method=kivi quantizer=int2_g64 method.takes=[int2_g64]"),
    _s("kivi 2, key per token", "kivi", "method=kivi quantizer=int2 method.key_axis=token"),
    _s("kivi evict, R 128", "eviction", "method=kivi method.evict=true"),
    _s("hf_quantized 2 (hqq)", "hf", "method=hf_quantized method.backend=hqq method.axis_key=1 method.axis_value=1"),
    _s("logquant 2", "logquant", "method=logquant"),
    _s("logquant 2, key per token", "logquant", "method=logquant method.key_axis=token"),
    _s("logquant 4", "logquant", "method=logquant quantizer=int4_g64"),
    _s("partial_logquant 2", "logquant", "method=partial_logquant"),
    _s("logquant evict", "eviction", "method=logquant method.evict=true"),
    _s("cocktail", "cocktail", "method=cocktail method.encoder=bm25"),
    _s("cocktail, random chunks", "cocktail", "method=cocktail method.encoder=bm25 method.search=none"),
    _s(
        "cocktail 15/35/50, per token",
        "cocktail",
        "method=cocktail method.encoder=bm25 method.split=[15,35,50] method.key_axis=token",
    ),
    _s(
        "the same, random chunks",
        "cocktail",
        "method=cocktail method.encoder=bm25 method.split=[15,35,50] method.key_axis=token method.search=none",
    ),
)
