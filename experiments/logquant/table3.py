"""LogQuant, Table 3: task groups of five models at 2 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant import common

_MATH = Group("Math", columns=(common.GSM8K.name,), published={"category": "Math"})
_CLAIMED = ("Math", "Synthetic Tasks", "Code Completion", common.MEAN)

ITEM = Grid(
    id="logquant/table3",
    number="Table 3",
    title="Task groups of five models at 2 bits",
    models=(
        Model("llama3.1-8b-instruct", "llama-3.1-8B-Instruct"),
        Model("qwen1.5-7b-chat-awq", "Qwen1.5-7B-Chat-AWQ"),
        Model("qwen1.5-14b-chat-awq", "Qwen1.5-14B-Chat-AWQ"),
        Model("qwen2-7b-instruct", "Qwen2-7B-Instruct"),
        Model("phi3-mini-128k-instruct", "Phi-3-mini-128k-instruct"),
    ),
    rows=(
        replace(common.BASELINE, published={"method": "baseline (16-bit)"}),
        common.kivi(2, {"method": "KiVi (2-bit)"}),
        common.own_kivi(2),
        common.logquant(2, {"method": "LogQuant (2-bit)"}),
        common.partial({"method": "PartialLogQuant (2-bit)"}),
    ),
    columns=(common.GSM8K, *(replace(column, published={}) for column in common.DATASETS)),
    groups=(_MATH, *common.GROUPS),
    mini_groups=(Group(common.MEAN),),
    only_groups=True,
    base="baseline",
    published="logquant_table3",
    claims=tuple(
        Claim(f"{name}: LogQuant is better than {other}", "LogQuant (2-bit)", f"{other} (2-bit)", name)
        for name in _CLAIMED
        for other in ("KiVi", "KIVI")
    ),
    words=(
        "Summarization loses next to nothing at 2 bits; Math, Synthetic Tasks and Code Completion lose most "
        "(sec. 4.2.3).",
    ),
    caption=f"""The paper: GSM8K (Math) and LongBench, 128 exact tokens at most; groups as in its Table 5. Two groups of
    Qwen1.5-7B-Chat-AWQ and of Qwen2-7B-Instruct are not legible in our copy of the paper: they have no number.
    {common.KIVI_NOTE} {common.ROUGE_NOTE}""",
)
