"""Cocktail, Table V: what its two modules do for score, memory and time."""

from dataclasses import replace

from experiments.cocktail.common import L40S_GIB, LLAMA, PROMPT, QMSUM, TIMED
from experiments.item import MINI, Claim, Column, Grid, Group, Row

_MEMORY = Column(
    name="GPU memory",
    data="efficiency",
    figure="peak_decode",
    scale=2**-30,
    unit="GiB",
    prompt=PROMPT,
    batch=1,
    memory_gb=L40S_GIB,
    published={"dataset": "qmsum"},
    value="gpu_memory_gb",
)
_TPOT = replace(_MEMORY, name="TPOT", figure="tpot_s", scale=1e6, unit="µs", digits=0, value="tpot_us")


def _variant(name: str, options: str) -> Row:
    return Row(
        name=name,
        setting=f"cocktail{options}",
        small=f"cocktail:encoder=bm25{options}",
        timed=f"{TIMED}{options}",
        published={"variant": name},
    )


ITEM = Grid(
    id="cocktail/table5",
    number="Table V",
    title="The two modules",
    models=LLAMA,
    rows=(
        Row(name="Baseline", setting="fp16", published={"variant": "Baseline"}),
        _variant("w/o Module I", ":search=none"),
        _variant("w/o Module II", ":reorder=false"),
        _variant("Cocktail", ""),
    ),
    columns=(QMSUM, _MEMORY, _TPOT),
    groups=(Group(name="Score", published={"dataset": "qmsum"}),),
    mini=MINI,
    base="Baseline",
    published="cocktail_table5",
    claims=(
        Claim(text="without module I the score drops", first="Cocktail", second="w/o Module I", column="Score"),
        Claim(
            text="without module II the score stays (within a point)",
            first="w/o Module II",
            second="Cocktail",
            column="Score",
            low=-1.0,
            high=1.0,
        ),
        Claim(
            text="without module II memory grows",
            first="w/o Module II",
            second="Cocktail",
            column="GPU memory",
            relative=True,
        ),
        Claim(
            text="without module II TPOT grows", first="w/o Module II", second="Cocktail", column="TPOT", relative=True
        ),
        Claim(
            text="memory is below FP16's",
            first="Cocktail",
            second="Baseline",
            column="GPU memory",
            low=-100.0,
            high=0.0,
            relative=True,
        ),
        Claim(
            text="TPOT is below FP16's",
            first="Cocktail",
            second="Baseline",
            column="TPOT",
            low=-100.0,
            high=0.0,
            relative=True,
        ),
    ),
    caption="""The paper: Llama2-7B, QMSum, one L40S; it calls QMSum's ROUGE "F1 score". Without module I, as many
    chunks of each width are drawn at random; without module II, chunks stay where they stand. Memory is the peak of
    decoding at batch 1; the paper does not say how it measured. Time and memory are of random prompts, whose chunks
    get 16, 4 and 2 bits in the shares 10, 30 and 60 %.""",
)
