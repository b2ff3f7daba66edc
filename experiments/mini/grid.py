"""The settings that are compared on mini, a line each in kvbench's grammar, and the pairs of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.measured import Setting

_HQQ = "backend=hqq:axis_key=1:axis_value=1"
# StreamingQuant and PartialStreaming of LogQuant's authors (src/LogQuant.py): W = (R - 4) // 2 = 62 of R = 128
_STREAMING = "sinks=4:recent=62:residual=124"
_PARTIAL_STREAMING = f"{_STREAMING}:value_residual=62"
_SHARES = "cocktail:encoder=bm25:split=[15,35,50]:key_axis=token"

GRID = (
    Setting("fp16", "fp16", "fp16"),
    Setting("atom 4", "atom", "atom:int4_token"),
    Setting("atom 2", "atom", "atom:int2_token"),
    Setting("kivi 4", "kivi", "kivi:int4"),
    Setting("kivi 3", "kivi", "kivi:int3"),
    Setting("kivi 2", "kivi", "kivi:int2"),
    Setting("kivi 2, G 64", "kivi", "kivi:int2_g64:takes=[int2_g64]"),
    Setting("kivi 2, key per token", "kivi", "kivi:int2:key_axis=token"),
    Setting("kivi 2, 4 sinks", "kivi", "kivi:int2:sinks=4"),
    Setting("kivi evict, R 128", "eviction", "kivi:evict=true"),
    # the newest tokens alone, as many as take the bytes of kivi 2 at 4096 tokens
    Setting("kivi evict, bytes of kivi 2", "eviction", "kivi:evict=true:residual=864"),
    # the eviction baselines by their papers, and two as harnesses have them, at the same bytes (H2O's scores included)
    Setting("streamingllm, bytes of kivi 2", "eviction", "streamingllm:budget=864"),
    Setting("streamingllm original positions", "eviction", "streamingllm:budget=864:position=original"),
    Setting("snapkv, bytes of kivi 2", "eviction", "snapkv:budget=832"),  # its answers are kept beside these
    Setting("h2o, bytes of kivi 2", "eviction", "h2o:budget=851"),
    Setting("h2o one-shot, bytes of kivi 2", "eviction", "h2o:evict=prefill:budget=832"),
    # groups of one token's channels, as with quanto's axis 0 in the authors' files
    Setting("hf_quantized 2 (hqq)", "hf", f"hf_quantized:{_HQQ}"),
    Setting("hf streaming 2 (hqq)", "hf", f"hf_quantized:{_HQQ}:{_STREAMING}"),
    Setting("hf partial streaming 2 (hqq)", "hf", f"hf_quantized:{_HQQ}:{_PARTIAL_STREAMING}"),
    Setting("hf_quantized 2 (quanto)", "hf", "hf_quantized:backend=quanto"),
    Setting("hf streaming 2 (quanto)", "hf", f"hf_quantized:backend=quanto:{_STREAMING}"),
    Setting("hf partial streaming 2 (quanto)", "hf", f"hf_quantized:backend=quanto:{_PARTIAL_STREAMING}"),
    Setting("logquant 2", "logquant", "logquant"),
    Setting("logquant 2, key per token", "logquant", "logquant:key_axis=token"),
    Setting("logquant 4", "logquant", "logquant:int4_g64"),
    Setting("partial_logquant 2", "logquant", "partial_logquant"),
    Setting("logquant evict", "eviction", "logquant:evict=true"),
    # the rule's exact tokens alone, with the window that takes the bytes of logquant 2 at 4096 tokens
    Setting("logquant evict, bytes of logquant 2", "eviction", "logquant:evict=true:window=302"),
    Setting("quantspec (both nibbles)", "quantspec", "quantspec:gamma=0"),
    Setting("kvquant 4, 1% outliers", "kvquant", "kvquant"),
    Setting("kvquant 3, 1% outliers", "kvquant", "kvquant:bits=3"),
    Setting("kvquant 2, 1% outliers", "kvquant", "kvquant:bits=2"),
    Setting("cocktail", "cocktail", "cocktail:encoder=bm25"),
    Setting("cocktail, random chunks", "cocktail", "cocktail:encoder=bm25:search=none"),
    Setting("cocktail 15/35/50, per token", "cocktail", _SHARES),
    Setting("the same, random chunks", "cocktail", f"{_SHARES}:search=none"),
)

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
        out: folder of the bundled model's table, scores and plot.
    """

    settings: tuple[Setting, ...]
    tasks: tuple[str, ...]
    limit: int
    out: str


COMPARISONS = {
    "all": Comparison(GRID, (), 100, "results/mini"),
    # does the search find the chunks that matter? both sides hold as many chunks of each width
    "search": Comparison(
        tuple(
            setting
            for setting in GRID
            if setting.name in ("fp16", "cocktail 15/35/50, per token", "the same, random chunks")
        ),
        ("key_value_hex", "copy", "copy_long"),
        200,
        "results/mini/search",
    ),
}
