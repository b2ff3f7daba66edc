"""LogQuant, Table 6: each data set of LongBench at 2 bits."""

from dataclasses import replace

from experiments.item import Claim, Grid, Group, Model
from experiments.logquant import common

_AT_128 = {"bits": "2", "reserved": "128"}

ITEM = Grid(
    id="logquant/table6",
    number="Table 6",
    title="Each data set of LongBench at 2 bits",
    models=(
        Model("llama3-8b-instruct", "llama-3-8B-Instruct"),
        Model("llama3.1-8b-instruct", "llama-3.1-8B-Instruct"),
        Model("qwen1.5-7b-chat", "Qwen1.5-7B-Chat"),
        Model("qwen1.5-7b-chat-awq", "Qwen1.5-7B-Chat-AWQ"),
        Model("qwen1.5-14b-chat-awq", "Qwen1.5-14B-Chat-AWQ"),
        Model("qwen2-7b-instruct", "Qwen2-7B-Instruct"),
        Model("phi3-mini-128k-instruct", "Phi-3-mini-128k-instruct"),
    ),
    rows=(
        replace(common.BASELINE, published={"method": "baseline", "bits": "16", "reserved": ""}),
        common.kivi(2, {"method": "KiVi", **_AT_128}),
        common.own_kivi(2),
        common.logquant(2, {"method": "LogQuant", **_AT_128}),
        common.released(2),
        common.partial({"method": "PartialLogQuant", **_AT_128}),
    ),
    columns=common.DATASETS,
    groups=(Group(common.MEAN),),
    base="baseline",
    published="logquant_table6",
    claims=(
        Claim("LogQuant is better than KiVi", "LogQuant (2-bit)", "KiVi (2-bit)", common.MEAN),
        Claim("LogQuant is better than KIVI", "LogQuant (2-bit)", "KIVI (2-bit)", common.MEAN),
        Claim(
            "LogQuant with keys per token is better than KiVi",
            "LogQuant (2-bit), keys per token",
            "KiVi (2-bit)",
            common.MEAN,
        ),
    ),
    caption=f"""The paper: 128 exact tokens at most. The numbers beside ours are of the authors' published result files,
    which hold more models and lengths than the printed table. {common.KIVI_NOTE} {common.ROUGE_NOTE}""",
)
