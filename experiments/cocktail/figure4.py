"""Cocktail, Figure 4: GPU memory of four models."""

from experiments.cocktail.common import LESS, MODELS, POINTS_CAPTION, TIMED_METHODS, point_column
from experiments.item import Claim, Grid

_NAME = "GPU memory"

ITEM = Grid(
    id="cocktail/figure4",
    number="Figure 4",
    title="GPU memory of different models",
    models=MODELS,
    rows=TIMED_METHODS,
    columns=(point_column(_NAME, "peak", 2**-30, "GiB"),),
    base="FP16",
    claims=(
        Claim(
            "Cocktail takes at least 12 % less memory than FP16 (the paper: 12 to 42 %)",
            "Cocktail",
            "FP16",
            _NAME,
            low=-100.0,
            high="-gpu memory reduction vs FP16 (min)",
            relative=True,
        ),
        *(
            Claim(f"Cocktail takes less memory than {name}", "Cocktail", name, _NAME, **LESS)
            for name in ("Atom INT2", "KIVI INT4")
        ),
    ),
    draw="bars",
    x="model, one sequence",
    y="peak GPU memory, GiB",
    caption=f"""The paper: QMSum, answers of 128 tokens, one L40S; it says neither the batch nor what is counted, and
    its points are not printed; that memory is less than with other methods is in its introduction. Here: one sequence,
    and the larger of the peaks while reading the prompt and while decoding. {POINTS_CAPTION}""",
)
