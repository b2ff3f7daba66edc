"""LogQuant, Table 7: each data set of LongBench at 2 and 4 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant.common import (
    BASELINE,
    DATASETS,
    KIVI_NOTE,
    MEAN,
    ROUGE_NOTE,
    kivi,
    logquant,
    own_kivi,
    released,
)

ITEM = Grid(
    id="logquant/table7",
    number="Table 7",
    title="Each data set of LongBench at 2 and 4 bits",
    models=(Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),),
    rows=(
        kivi(2, {"method": "KiVi (2-bit)"}),
        kivi(4, {"method": "KiVi (4-bit)"}),
        own_kivi(2),
        own_kivi(4),
        logquant(2, {"method": "LogQuant (2-bit)"}),
        logquant(4, {"method": "LogQuant (4-bit)"}),
        released(2),
        released(4),
        replace(BASELINE, published={"method": "baseline"}),
    ),
    columns=DATASETS,
    groups=(Group(name=MEAN),),
    base="baseline",
    published="logquant_table7",
    claims=(
        *(
            Claim(
                text=f"at 4 bits, {name} loses at most a point",
                first=f"{name} (4-bit)",
                second="baseline",
                column=MEAN,
                low=-1.0,
            )
            for name in ("LogQuant", "KiVi", "KIVI")
        ),
        *(
            Claim(
                text=f"{name}: 2 bits are worse than 4",
                first=f"{name} (2-bit)",
                second=f"{name} (4-bit)",
                column=MEAN,
                low=-100.0,
                high=0.0,
            )
            for name in ("LogQuant", "KiVi", "KIVI")
        ),
    ),
    caption=f"""The paper: 128 exact tokens at most (window of 42), groups of 64. {KIVI_NOTE} {ROUGE_NOTE}""",
)
