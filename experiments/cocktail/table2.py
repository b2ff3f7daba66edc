"""Cocktail, Table II: four models, five methods, eight data sets of LongBench."""

from experiments.cocktail.common import AVERAGE, DATASETS, METHODS, MODELS
from experiments.item import Claim, Grid, Group

ITEM = Grid(
    id="cocktail/table2",
    number="Table II",
    title="Cocktail and the baseline methods",
    models=MODELS,
    rows=METHODS,
    columns=DATASETS,
    groups=(Group(name=AVERAGE, published={"dataset": "average"}),),
    base="FP16",
    published="cocktail_table2",
    claims=(
        Claim(
            text="Cocktail loses at most 1 point of FP16's average",
            first="Cocktail",
            second="FP16",
            column=AVERAGE,
            low=-1.0,
        ),
        Claim(text="Cocktail is better than Atom (INT2)", first="Cocktail", second="Atom INT2", column=AVERAGE),
        Claim(text="Cocktail is better than Atom (INT4)", first="Cocktail", second="Atom INT4", column=AVERAGE),
        Claim(text="Cocktail is better than KIVI (INT2)", first="Cocktail", second="KIVI INT2", column=AVERAGE),
        Claim(text="Cocktail is better than KIVI (INT4)", first="Cocktail", second="KIVI INT4", column=AVERAGE),
        Claim(text="Cocktail is better than KVQuant", first="Cocktail", second="KVQuant", column=AVERAGE),
    ),
    words=("The paper states a mean loss of 0.055 points to FP16 over the four models (sec. IV-B).",),
    caption="""The paper: alpha 0.6, beta 0.1, chunks of 32 tokens, answers of 128 tokens, one L40S. "INT2 and INT4
    uniformly in Atom and KIVI, respectively" does not say which method had which width, and the table has one row
    for each: here both methods have both widths, and both are set against the paper's one row. Llama-2 is taken to
    be the base model, Mistral-7B to be Instruct-v0.2, Longchat-7B to be v1.5-32k. The printed average of Mistral's
    KIVI row (48.39) does not follow from its cells (48.01).""",
)
