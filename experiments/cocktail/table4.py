"""Cocktail, Table IV: encoders of the chunk search."""

from experiments.cocktail.common import AVERAGE, DATASETS, LLAMA
from experiments.item import Claim, Grid, Group, Row

_OURS = "Facebook-Contriever"

ITEM = Grid(
    id="cocktail/table4",
    number="Table IV",
    title="Encoders of contexts and queries",
    models=LLAMA,
    rows=(
        Row(name="Baseline", setting="fp16", published={"encoder": "Baseline"}),
        Row(name="ADA-002", setting="cocktail:encoder=openai", published={"encoder": "ADA-002"}),
        Row(name="BM25", setting="cocktail:encoder=bm25", published={"encoder": "BM25"}),
        Row(name="LLM Embedder", setting="cocktail:encoder=llm_embedder", published={"encoder": "LLM Embedder"}),
        Row(name=_OURS, setting="cocktail", published={"encoder": _OURS}),
    ),
    columns=tuple(column for column in DATASETS if column.task in ("qasper", "samsum", "triviaqa", "repobench-p")),
    groups=(Group(name=AVERAGE),),
    base="Baseline",
    published="cocktail_table4",
    claims=(
        Claim(text="Contriever is better than BM25", first=_OURS, second="BM25", column=AVERAGE),
        Claim(text="Contriever is better than LLM Embedder", first=_OURS, second="LLM Embedder", column=AVERAGE),
        Claim(text="Contriever is better than ADA-002", first=_OURS, second="ADA-002", column=AVERAGE),
        Claim(text="BM25 loses to the baseline", first="Baseline", second="BM25", column=AVERAGE),
    ),
    caption="""The paper: Llama2-7B, alpha 0.6, beta 0.1, chunks of 32 tokens; it prints no average. Its baseline
    differs from that of its Table II. ADA-002 needs an account of OpenAI, the other encoders but BM25 their
    weights: a row without them stays empty.""",
)
