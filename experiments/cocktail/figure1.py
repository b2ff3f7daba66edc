"""Cocktail, Figure 1: the similarity of queries to the chunks of a long context."""

from experiments.cocktail.common import QMSUM
from experiments.item import Computed

ITEM = Computed(
    id="cocktail/figure1",
    number="Figure 1",
    title="Similarity of queries and the chunks of a context",
    compute="similarity:heat",
    options={
        "encoder": "contriever",
        "small": "bm25",
        "real": "minilm",
        "queries": 8,
        "length": 4096,
        "chunk_size": 32,
        "passage": QMSUM,
    },
    needs="the weights of facebook/contriever; with --data mini nothing",
    draw="heat",
    x="chunk of 32 tokens",
    y="query",
    words=("For each query, only a small portion of the chunks is highly relevant (sec. I).",),
    caption="""The paper: a long passage of 89 chunks and ten queries, neither of them printed. Here: a generated
    document of 4096 tokens with many records and eight questions about them (bundled task `several`); alpha 0.6 and
    beta 0.1 decide which chunks are FP16, INT4 and INT2. With --data real: the first 4,096 tokens or so of the meeting
    of QMSum that most questions are asked about, and these. With --data mini the encoder is BM25 in place of
    Contriever, with --data real all-MiniLM-L6-v2.""",
)
