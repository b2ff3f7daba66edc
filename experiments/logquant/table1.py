"""LogQuant, Table 1: the first two tokens in original precision."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model, Row
from experiments.logquant import common

_MEAN = "Accuracy"
_SINKS, _OWN_SINKS = "KiVi (2-bit) + sinks", "KIVI (2-bit) + sinks"

ITEM = Grid(
    id="logquant/table1",
    number="Table 1",
    title="The first two tokens (sinks) in original precision",
    models=(
        Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),
        Model("qwen1.5-7b-chat", "Qwen1.5-7B-Chat"),
    ),
    rows=(
        replace(common.BASELINE, published={"method": "baseline(BF16)"}),
        common.kivi(4, {"method": "KiVi(4-bit)"}),
        common.kivi(2, {"method": "KiVi(2-bit)"}),
        Row(_SINKS, "hf_quantized:sinks=2", published={"method": "KiVi(2-bit)+Sink(BF16)"}),
        common.own_kivi(2),
        Row(_OWN_SINKS, "kivi:int2:sinks=2"),
    ),
    columns=(replace(common.GSM8K, published={"dataset": "gsm8k"}),),
    real=(common.GSM8K, common.GSM8K_KL, common.GSM8K_FLIPS),
    groups=(Group(_MEAN, published={"dataset": "gsm8k"}),),
    base="baseline",
    published="logquant_table1",
    value="accuracy",
    claims=(
        common.closer("KiVi (4-bit)", "KiVi (2-bit)"),
        common.closer(_SINKS, "KiVi (2-bit)"),
        common.closer(_OWN_SINKS, "KIVI (2-bit)"),
        Claim("2 bits lose accuracy", "KiVi (2-bit)", "baseline", _MEAN, low=-100.0, high=0.0),
        Claim("exact sinks change little (within a point)", _SINKS, "KiVi (2-bit)", _MEAN, low=-1.0, high=1.0),
        Claim(
            "exact sinks change little of KIVI (within a point)", _OWN_SINKS, "KIVI (2-bit)", _MEAN, low=-1.0, high=1.0
        ),
    ),
    caption=f"""The paper: GSM8K with five examples, the newest 128 tokens exact. {common.KIVI_NOTE}""",
)
