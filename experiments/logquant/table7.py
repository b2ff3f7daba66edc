"""LogQuant, Table 7: each data set of LongBench at 2 and 4 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant import common

ITEM = Grid(
    id="logquant/table7",
    number="Table 7",
    title="Each data set of LongBench at 2 and 4 bits",
    models=(Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),),
    rows=(
        *common.TWO_AND_FOUR,
        common.released(2),
        common.released(4),
        replace(common.BASELINE, published={"method": "baseline"}),
    ),
    columns=common.DATASETS,
    groups=(Group(common.MEAN),),
    base="baseline",
    published="logquant_table7",
    claims=(
        *(
            Claim(f"at 4 bits, {name} loses at most a point", f"{name} (4-bit)", "baseline", common.MEAN, low=-1.0)
            for name in ("LogQuant", "KiVi", "KIVI")
        ),
        *(
            Claim(f"{name}: 2 bits are worse than 4", f"{name} (2-bit)", f"{name} (4-bit)", common.MEAN, -100.0, 0.0)
            for name in ("LogQuant", "KiVi", "KIVI")
        ),
    ),
    caption=f"""The paper: 128 exact tokens at most (window of 42), groups of 64. {common.KIVI_NOTE}
    {common.ROUGE_NOTE}""",
)
