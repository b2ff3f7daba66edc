"""Cocktail, Table IV: encoders of the chunk search."""

from experiments.cocktail.common import AVERAGE, DATASETS, LLAMA, REAL
from experiments.item import Claim, Grid, Group, Row

_OURS, _MINILM = "Facebook-Contriever", "all-MiniLM-L6-v2 (not in the paper)"

ITEM = Grid(
    id="cocktail/table4",
    number="Table IV",
    title="Encoders of contexts and queries",
    models=LLAMA,
    rows=(
        Row("Baseline", "fp16", published={"encoder": "Baseline"}),
        Row("ADA-002", "cocktail:encoder=openai", published={"encoder": "ADA-002"}),
        Row("BM25", "cocktail:encoder=bm25", published={"encoder": "BM25"}),
        Row("LLM Embedder", "cocktail:encoder=llm_embedder", published={"encoder": "LLM Embedder"}),
        Row(_OURS, "cocktail", published={"encoder": _OURS}),
        Row(_MINILM, REAL),
    ),
    columns=tuple(column for column in DATASETS if column.task in ("qasper", "samsum", "triviaqa", "repobench-p")),
    groups=(Group(AVERAGE),),
    base="Baseline",
    published="cocktail_table4",
    claims=(
        Claim("Contriever is better than BM25", _OURS, "BM25", AVERAGE),
        Claim("Contriever is better than LLM Embedder", _OURS, "LLM Embedder", AVERAGE),
        Claim("Contriever is better than ADA-002", _OURS, "ADA-002", AVERAGE),
        Claim("BM25 loses to the baseline", "Baseline", "BM25", AVERAGE),
        Claim("substitute: another trained encoder (MiniLM) is better than BM25", _MINILM, "BM25", AVERAGE),
    ),
    caption="""The paper: Llama2-7B, alpha 0.6, beta 0.1, chunks of 32 tokens; it prints no average. Its baseline
    differs from that of its Table II. ADA-002 needs an account of OpenAI, the other encoders but BM25 their
    weights: a row without them stays empty.""",
)
