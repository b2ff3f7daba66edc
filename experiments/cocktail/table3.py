"""Cocktail, Table III: the chunk size."""

from experiments.cocktail.common import ALIKE, LLAMA, QMSUM, REAL
from experiments.item import Claim, Grid, Group, Row

_BM25 = "cocktail:encoder=bm25:chunk_size={}"
_MEAN = "Average"

ITEM = Grid(
    id="cocktail/table3",
    number="Table III",
    title="The impact of the chunk size",
    models=LLAMA,
    rows=tuple(
        Row(
            f"chunks of {size}",
            "cocktail" if size == 32 else f"cocktail:chunk_size={size}",
            small="cocktail:encoder=bm25" if size == 32 else _BM25.format(size),
            real=REAL if size == 32 else f"{REAL}:chunk_size={size}",
            published={"chunk_size": str(size)},
        )
        for size in (8, 16, 32, 64, 128, 256)
    ),
    columns=(QMSUM,),
    groups=(Group(_MEAN, published={"dataset": "qmsum"}),),
    base="chunks of 32",
    published="cocktail_table3",
    value="rouge",
    claims=(
        Claim(
            "chunks of 8 are as good as chunks of 32 (within a point)", "chunks of 8", "chunks of 32", _MEAN, **ALIKE
        ),
        Claim("chunks of 128 are worse than chunks of 32", "chunks of 32", "chunks of 128", _MEAN),
        Claim("chunks of 256 are worse than chunks of 32", "chunks of 32", "chunks of 256", _MEAN),
    ),
    caption="""The paper: Llama2-7B, QMSum, ROUGE, alpha 0.6, beta 0.1. The score is LongBench's ROUGE-L.""",
)
