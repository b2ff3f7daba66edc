"""QuantSpec, Table 2: perplexity of the 8-bit target."""

from experiments.item import Claim, Column, Grid, Model, Row

_FP16, _INT8 = "FP16", "INT8 (QuantSpec target)"


def perplexity(data: str, name: str, key: str = "", options: tuple[str, ...] = ()) -> Column:
    """Return the column of a text's perplexity."""
    published = {"dataset": key} if key else {}
    return Column(name, data, options=options, figure="perplexity", scale=1.0, unit="", digits=4, published=published)


#: in float32, as rounding to bfloat16 changes tiny's perplexity more than 8 bits do
MINI = (perplexity("perplexity/mini_text", "bundled texts", options=("model.dtype=float32",)),)

ITEM = Grid(
    id="quantspec/table2",
    number="Table 2",
    title="Perplexity of the 8-bit target",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    rows=(
        Row(_FP16, "fp16", published={"kv_cache": _FP16}),
        Row(_INT8, "quantspec:gamma=0", published={"kv_cache": _INT8}),
    ),
    columns=(
        perplexity("perplexity/wikitext2", "WikiText-2", "wikitext2"),
        perplexity("perplexity/c4", "C4", "c4"),
    ),
    mini=MINI,
    base=_FP16,
    published="quantspec_table2",
    value="perplexity",
    claims=tuple(
        Claim(f"{column}: 8 bits cost at most 0.02 of perplexity", _INT8, _FP16, column, low=-100.0, high=0.02)
        for column in ("WikiText-2", "C4", "bundled texts")
    ),
    caption="""The paper: groups of 128, the newest 256 tokens exact; it states neither windows nor protocol. Here:
    windows of 2048 tokens (512 with the bundled texts, which are read in float32) as GPTQ cuts them, read through the
    cache token by token, as it is when answers are generated; C4's windows as Atom and KVQuant draw them.""",
)
