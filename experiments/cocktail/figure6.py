"""Cocktail, Figure 6: throughput by batch, until memory ends."""

from experiments.cocktail.common import L40S_GIB, LONG, METHODS, MODELS, PROMPT
from experiments.item import Claim, Column, Grid

_BATCHES = (1, 2, 4, 8, 16, 32, 64)

ITEM = Grid(
    id="cocktail/figure6",
    number="Figure 6",
    title="Throughput by batch",
    models=MODELS,
    rows=METHODS,
    columns=tuple(
        Column(
            name=f"batch {batch}",
            data="efficiency",
            figure="tokens_per_s",
            scale=1.0,
            unit="tokens/s",
            digits=1,
            prompt=PROMPT,
            prompts=LONG,
            batch=batch,
            memory_gb=L40S_GIB,
            x=float(batch),
        )
        for batch in _BATCHES
    ),
    base="FP16",
    claims=(
        Claim(
            text="at batch 1, the search makes Cocktail slower than KIVI (INT4)",
            first="Cocktail",
            second="KIVI INT4",
            column="batch 1",
            low=-100.0,
            high=0.0,
            relative=True,
        ),
        Claim(
            text="at batch 4, Cocktail's throughput is above KVQuant's",
            first="Cocktail",
            second="KVQuant",
            column="batch 4",
            relative=True,
        ),
    ),
    words=(
        "As the batch grows, Cocktail's throughput passes that of the uniform methods (sec. IV-B).",
        "Lines end where memory does (48 GB).",
    ),
    draw="lines",
    x="batch",
    y="throughput, tokens/s",
    caption="""The paper: QMSum, answers of 128 tokens, one L40S (48 GB); its points are not printed. Here: tokens
    per second with search and prefill inside, at most 44.7 GiB, random weights, prompts of 3500 tokens (4k models)
    and 14336 tokens (32k models); a cross ends a line where a batch did not fit.""",
)
