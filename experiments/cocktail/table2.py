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
    groups=(Group(AVERAGE, published={"dataset": "average"}),),
    base="FP16",
    published="cocktail_table2",
    claims=(
        Claim("Cocktail loses at most 1 point of FP16's average", "Cocktail", "FP16", AVERAGE, low=-1.0),
        Claim("Cocktail is better than Atom (INT2)", "Cocktail", "Atom INT2", AVERAGE),
        Claim("Cocktail is better than Atom (INT4)", "Cocktail", "Atom INT4", AVERAGE),
        Claim("Cocktail is better than KIVI (INT2)", "Cocktail", "KIVI INT2", AVERAGE),
        Claim("Cocktail is better than KIVI (INT4)", "Cocktail", "KIVI INT4", AVERAGE),
        Claim("Cocktail is better than KVQuant", "Cocktail", "KVQuant", AVERAGE),
    ),
    words=("The paper states a mean loss of 0.055 points to FP16 over the four models (sec. IV-B).",),
    caption="""The paper: alpha 0.6, beta 0.1, chunks of 32 tokens, answers of 128 tokens, one L40S. "INT2 and INT4
    uniformly in Atom and KIVI, respectively" does not say which method had which width, and the table has one row
    for each: here both methods have both widths, and both are set against the paper's one row. Llama-2 is taken to
    be the base model, Mistral-7B to be Instruct-v0.2, Longchat-7B to be v1.5-32k. The printed average of Mistral's
    KIVI row (48.39) does not follow from its cells (48.01).""",
)
