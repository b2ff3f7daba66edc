"""Cocktail, Figure 4: GPU memory of four models."""

from experiments.cocktail.common import L40S_GIB, LONG, METHODS, MODELS, PROMPT
from experiments.item import Claim, Column, Grid

_NAME = "GPU memory"

ITEM = Grid(
    id="cocktail/figure4",
    number="Figure 4",
    title="GPU memory of different models",
    models=MODELS,
    rows=METHODS,
    columns=(
        Column(
            name=_NAME,
            data="efficiency",
            figure="peak_decode",
            scale=2**-30,
            unit="GiB",
            prompt=PROMPT,
            prompts=LONG,
            batch=1,
            memory_gb=L40S_GIB,
        ),
    ),
    base="FP16",
    claims=(
        Claim(
            text="Cocktail takes at least 12 % less memory than FP16 (the paper: 12 to 42 %)",
            first="Cocktail",
            second="FP16",
            column=_NAME,
            low=-100.0,
            high="-gpu memory reduction vs FP16 (min)",
            relative=True,
        ),
    ),
    draw="bars",
    x="model",
    y="peak memory of decoding, GiB",
    caption="""The paper: QMSum, answers of 128 tokens, one L40S; its points are not printed. Here: the peak of
    decoding at batch 1, with random weights (memory does not depend on them) and prompts as long as QMSum's: 3500
    tokens where the context is 4k, 14336 where it is 32k. Cocktail's chunks get 16, 4 and 2 bits in the shares 10,
    30 and 60 %.""",
)
