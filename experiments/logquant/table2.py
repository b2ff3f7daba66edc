"""LogQuant, Table 2: task groups at 2 and 4 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant import common

#: the table prints means of groups only
_COLUMNS = tuple(replace(column, published={}) for column in common.DATASETS)

ITEM = Grid(
    id="logquant/table2",
    number="Table 2",
    title="Task groups at 2 and 4 bits",
    models=(Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),),
    rows=(
        *common.TWO_AND_FOUR,
        replace(common.BASELINE, published={"method": "baseline"}),
    ),
    columns=_COLUMNS,
    groups=common.GROUPS,
    mini_groups=(Group(common.MEAN),),
    only_groups=True,
    base="baseline",
    published="logquant_table2",
    claims=tuple(
        claim
        for name in (*(group.name for group in common.GROUPS), common.MEAN)
        for claim in (
            Claim(f"{name}: at 2 bits, LogQuant is better than KiVi", "LogQuant (2-bit)", "KiVi (2-bit)", name),
            Claim(f"{name}: at 2 bits, LogQuant is better than KIVI", "LogQuant (2-bit)", "KIVI (2-bit)", name),
            Claim(f"{name}: at 4 bits, LogQuant loses at most a point", "LogQuant (4-bit)", "baseline", name, low=-1.0),
        )
    ),
    caption=f"""The paper: LongBench, 128 exact tokens at most (window of 42), groups of 64; the groups of tasks are
    those of its Table 5, each the plain mean of its data sets. Its differences are taken from truncated baselines.
    {common.KIVI_NOTE} {common.ROUGE_NOTE}""",
)
