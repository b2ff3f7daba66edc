"""Cocktail, Figure 5: time per output token of four models."""

from experiments.cocktail.common import LESS, MODELS, POINTS_CAPTION, RANDOM_KVQUANT, TIMED_METHODS, point_column
from experiments.item import Claim, Grid

_NAME = "TPOT"

ITEM = Grid(
    id="cocktail/figure5",
    number="Figure 5",
    title="Time per output token (TPOT) of different models",
    models=MODELS,
    rows=TIMED_METHODS,
    columns=(point_column(_NAME, "tpot_s", 1e3, "ms"),),
    base="FP16",
    claims=(
        Claim(
            "Cocktail takes at least 32 % less time than FP16 (the paper: 32 to 52 %)",
            "Cocktail",
            "FP16",
            _NAME,
            low=-100.0,
            high="-TPOT reduction vs FP16 (min)",
            relative=True,
        ),
        *(
            Claim(f"Cocktail takes less time than {name}", "Cocktail", name, _NAME, **LESS)
            for name in ("Atom INT2", "Atom INT4", "KIVI INT2", "KIVI INT4", RANDOM_KVQUANT)
        ),
    ),
    draw="bars",
    x="model, one sequence",
    y="TPOT (median), ms",
    caption=f"""The paper: QMSum, answers of 128 tokens, one L40S; it does not say the batch, and its points are not
    printed. Here: the median step of one sequence. {POINTS_CAPTION} Such a step reads 13 GB of weights (Llama2-13B: 26)
    and 2 to 8 GB of keys and values, so that on any GPU a smaller cache can save 10 % of the time for Llama-2 and 28 %
    for Longchat-7B; the paper's 28 ms for Llama2-7B in FP16 are half as much again as an L40S needs to read the bytes
    (19 ms, by python -m kvbench.bench predict).""",
)
