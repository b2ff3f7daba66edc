"""LogQuant, Table 2: task groups at 2 and 4 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant.common import (
    BASELINE,
    DATASETS,
    GROUPS,
    KIVI_NOTE,
    MEAN,
    ROUGE_NOTE,
    kivi,
    logquant,
    own_kivi,
)

#: the table prints means of groups only
_COLUMNS = tuple(replace(column, published={}) for column in DATASETS)

ITEM = Grid(
    id="logquant/table2",
    number="Table 2",
    title="Task groups at 2 and 4 bits",
    models=(Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),),
    rows=(
        kivi(2, {"method": "KiVi (2-bit)"}),
        kivi(4, {"method": "KiVi (4-bit)"}),
        own_kivi(2),
        own_kivi(4),
        logquant(2, {"method": "LogQuant (2-bit)"}),
        logquant(4, {"method": "LogQuant (4-bit)"}),
        replace(BASELINE, published={"method": "baseline"}),
    ),
    columns=_COLUMNS,
    groups=GROUPS,
    mini_groups=(Group(name=MEAN),),
    only_groups=True,
    base="baseline",
    published="logquant_table2",
    claims=tuple(
        claim
        for name in (*(group.name for group in GROUPS), MEAN)
        for claim in (
            Claim(
                text=f"{name}: at 2 bits, LogQuant is better than KiVi",
                first="LogQuant (2-bit)",
                second="KiVi (2-bit)",
                column=name,
            ),
            Claim(
                text=f"{name}: at 2 bits, LogQuant is better than KIVI",
                first="LogQuant (2-bit)",
                second="KIVI (2-bit)",
                column=name,
            ),
            Claim(
                text=f"{name}: at 4 bits, LogQuant loses at most a point",
                first="LogQuant (4-bit)",
                second="baseline",
                column=name,
                low=-1.0,
            ),
        )
    ),
    caption=f"""The paper: LongBench, 128 exact tokens at most (window of 42), groups of 64; the groups of tasks are
    those of its Table 5, each the plain mean of its data sets. Its differences are taken from truncated baselines.
    {KIVI_NOTE} {ROUGE_NOTE}""",
)
