"""The settings that are compared on tiny and mini, one line each, as they would be typed; and which with which."""

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


_HQQ = "method.backend=hqq method.axis_key=1 method.axis_value=1"
# StreamingQuant and PartialStreaming of LogQuant's authors (src/LogQuant.py): W = (R - 4) // 2 = 62 of R = 128
_STREAMING = "method.sinks=4 method.recent=62 method.residual=124"
_PARTIAL_STREAMING = f"{_STREAMING} method.value_residual=62"

GRID = (
    _s("fp16", "fp16", "method=fp16"),
    _s("atom 4", "atom", "method=atom quantizer=int4_token"),
    _s("atom 2", "atom", "method=atom quantizer=int2_token"),
    _s("kivi 4", "kivi", "method=kivi quantizer=int4"),
    _s("kivi 3", "kivi", "method=kivi quantizer=int3"),
    _s("kivi 2", "kivi", "method=kivi quantizer=int2"),
    _s("kivi 2, G 64", "kivi", "method=kivi quantizer=int2_g64 method.takes=[int2_g64]"),
    _s("kivi 2, key per token", "kivi", "method=kivi quantizer=int2 method.key_axis=token"),
    _s("kivi 2, 4 sinks", "kivi", "method=kivi quantizer=int2 method.sinks=4"),
    _s("kivi evict, R 128", "eviction", "method=kivi method.evict=true"),
    # the newest tokens alone, as many as take the bytes of kivi 2 at 4096 tokens
    _s("kivi evict, bytes of kivi 2", "eviction", "method=kivi method.evict=true method.residual=864"),
    # the eviction baselines by their papers, and two as harnesses have them, at the same bytes (H2O's scores included)
    _s("streamingllm, bytes of kivi 2", "eviction", "method=streamingllm method.budget=864"),
    _s("streamingllm original positions", "eviction", "method=streamingllm method.budget=864 method.position=original"),
    _s("snapkv, bytes of kivi 2", "eviction", "method=snapkv method.budget=832"),  # its answers are kept beside these
    _s("h2o, bytes of kivi 2", "eviction", "method=h2o method.budget=851"),
    _s("h2o one-shot, bytes of kivi 2", "eviction", "method=h2o method.evict=prefill method.budget=832"),
    # groups of one token's channels, as with quanto's axis 0 in the authors' files
    _s("hf_quantized 2 (hqq)", "hf", f"method=hf_quantized {_HQQ}"),
    _s("hf streaming 2 (hqq)", "hf", f"method=hf_quantized {_HQQ} {_STREAMING}"),
    _s("hf partial streaming 2 (hqq)", "hf", f"method=hf_quantized {_HQQ} {_PARTIAL_STREAMING}"),
    _s("hf_quantized 2 (quanto)", "hf", "method=hf_quantized method.backend=quanto"),
    _s("hf streaming 2 (quanto)", "hf", f"method=hf_quantized method.backend=quanto {_STREAMING}"),
    _s("hf partial streaming 2 (quanto)", "hf", f"method=hf_quantized method.backend=quanto {_PARTIAL_STREAMING}"),
    _s("logquant 2", "logquant", "method=logquant"),
    _s("logquant 2, key per token", "logquant", "method=logquant method.key_axis=token"),
    _s("logquant 4", "logquant", "method=logquant quantizer=int4_g64"),
    _s("partial_logquant 2", "logquant", "method=partial_logquant"),
    _s("logquant evict", "eviction", "method=logquant method.evict=true"),
    # the rule's exact tokens alone, with the window that takes the bytes of logquant 2 at 4096 tokens
    _s("logquant evict, bytes of logquant 2", "eviction", "method=logquant method.evict=true method.window=302"),
    _s("quantspec (both nibbles)", "quantspec", "method=quantspec method.gamma=0"),
    _s("kvquant 4, 1% outliers", "kvquant", "method=kvquant"),
    _s("kvquant 3, 1% outliers", "kvquant", "method=kvquant method.bits=3"),
    _s("kvquant 2, 1% outliers", "kvquant", "method=kvquant method.bits=2"),
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

_BY_NAME = {setting.name: setting for setting in GRID}

#: what a claim is about: the first of the two less the second, over the samples that both have done
PAIRS = (
    ("kivi 2", "kivi 2, key per token"),
    ("kivi 2", "kivi evict, bytes of kivi 2"),
    ("kivi 2", "snapkv, bytes of kivi 2"),
    ("kivi 2", "h2o, bytes of kivi 2"),
    ("kivi 2", "streamingllm, bytes of kivi 2"),
    ("h2o, bytes of kivi 2", "h2o one-shot, bytes of kivi 2"),
    ("logquant 2", "kivi 2"),
    ("logquant 2", "kivi 2, G 64"),
    ("logquant 2", "hf_quantized 2 (hqq)"),
    ("logquant 2", "hf_quantized 2 (quanto)"),
    ("logquant 2, key per token", "hf_quantized 2 (hqq)"),
    ("logquant 2, key per token", "hf_quantized 2 (quanto)"),
    ("logquant 2, key per token", "hf streaming 2 (hqq)"),
    ("logquant 2, key per token", "hf streaming 2 (quanto)"),
    ("logquant 2", "partial_logquant 2"),
    ("logquant 2", "logquant evict, bytes of logquant 2"),
    ("logquant evict", "kivi evict, R 128"),
    ("kvquant 2, 1% outliers", "kivi 2"),
    ("cocktail", "atom 2"),
    ("cocktail", "kivi 2"),
    ("cocktail", "cocktail, random chunks"),
    ("cocktail 15/35/50, per token", "the same, random chunks"),
    ("cocktail 15/35/50, per token", "kivi 4"),
)


@dataclass(frozen=True)
class Comparison:
    """Settings that are run and folded together.

    Args:
        settings: the rows.
        tasks: of mini; empty: all.
        limit: samples a task and length.
        out: where table, scores and plot go.
    """

    settings: tuple[Setting, ...]
    tasks: tuple[str, ...]
    limit: int
    out: str


COMPARISONS = {
    "all": Comparison(GRID, (), 100, "results/mini"),
    # does the search find the chunks that matter? both sides hold as many chunks of each width
    "search": Comparison(
        tuple(_BY_NAME[name] for name in ("fp16", "cocktail 15/35/50, per token", "the same, random chunks")),
        ("key_value_hex", "copy", "copy_long"),
        200,
        "results/mini/search",
    ),
}
