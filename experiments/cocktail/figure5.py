"""Cocktail, Figure 5: time per output token of four models."""

from experiments.cocktail.common import L40S_GIB, LONG, METHODS, MODELS, PROMPT
from experiments.item import Claim, Column, Grid

_NAME = "TPOT"

ITEM = Grid(
    id="cocktail/figure5",
    number="Figure 5",
    title="Time per output token (TPOT) of different models",
    models=MODELS,
    rows=METHODS,
    columns=(
        Column(
            name=_NAME,
            data="efficiency",
            figure="tpot_s",
            scale=1e3,
            unit="ms",
            prompt=PROMPT,
            prompts=LONG,
            batch=1,
            memory_gb=L40S_GIB,
        ),
    ),
    base="FP16",
    claims=(
        Claim(
            text="Cocktail takes at least 32 % less time than FP16 (the paper: 32 to 52 %)",
            first="Cocktail",
            second="FP16",
            column=_NAME,
            low=-100.0,
            high="-TPOT reduction vs FP16 (min)",
            relative=True,
        ),
        *(
            Claim(
                text=f"Cocktail takes less time than {name}",
                first="Cocktail",
                second=name,
                column=_NAME,
                low=-100.0,
                high=0.0,
                relative=True,
            )
            for name in ("Atom INT2", "Atom INT4", "KIVI INT2", "KIVI INT4", "KVQuant")
        ),
    ),
    draw="bars",
    x="model",
    y="TPOT (median), ms",
    caption="""The paper: QMSum, answers of 128 tokens, one L40S; its points are not printed. Here: the median step
    at batch 1, with random weights (time does not depend on them) and prompts as long as QMSum's: 3500 tokens where
    the context is 4k, 14336 where it is 32k. Cocktail's chunks get 16, 4 and 2 bits in the shares 10, 30 and 60 %.""",
)
