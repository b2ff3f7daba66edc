"""The models, methods and data sets that Cocktail's items share."""

from dataclasses import replace
from typing import Any

from experiments.data import COMPILED
from experiments.item import Column, Model, Row

MODELS = (
    Model("llama2-7b", "Llama2-7B"),
    Model("llama2-13b", "Llama2-13B"),
    Model("mistral-7b", "Mistral-7B"),
    Model("longchat-7b", "Longchat-7B"),
)
LLAMA = MODELS[:1]
#: bounds of claims: a share less than the other row, and a score within a point of it
LESS: dict[str, Any] = {"low": -100.0, "high": 0.0, "relative": True}
ALIKE: dict[str, Any] = {"low": -1.0, "high": 1.0}
AVERAGE = "Average"

#: random prompts have no chunk that resembles the question: the widths are shares by rank
TIMED = "cocktail:split=[10,30,60]:encoder=bm25"
#: the trained encoder that --data real has in place of Contriever
REAL = "cocktail:encoder=minilm"
COCKTAIL = Row(
    "Cocktail",
    "cocktail",
    small="cocktail:encoder=bm25",
    real=REAL,
    timed=TIMED,
    published={"method": "Cocktail"},
)
METHODS = (
    Row("FP16", "fp16", published={"method": "FP16"}),
    Row("Atom INT2", "atom:int2_token", published={"method": "Atom"}),
    Row("Atom INT4", "atom:int4_token", published={"method": "Atom"}),
    Row("KIVI INT2", "kivi:int2", published={"method": "KIVI"}),
    Row("KIVI INT4", "kivi:int4", published={"method": "KIVI"}),
    Row("KVQuant", "kvquant", published={"method": "KVQuant"}),
    COCKTAIL,
)
#: the row of points: its time and memory depend on the share of outliers alone, which a calibration fixes
RANDOM_KVQUANT = "KVQuant, calibrated on random weights"
#: the rows of points of time and memory
TIMED_METHODS = tuple(replace(row, name=RANDOM_KVQUANT) if row.name == "KVQuant" else row for row in METHODS)

_NAMES = {
    "qasper": "Qasper",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "lcc": "LCC",
    "repobench-p": "RepoBench-P",
}
DATASETS = tuple(
    Column(name, "longbench_cocktail", task=task, published={"dataset": task}) for task, name in _NAMES.items()
)
QMSUM = DATASETS[1]

#: tokens of QMSum's prompts: LongBench cuts them to 3,500 for models of 4k; else they have about 14k in the mean
PROMPT, LONG = 3500, {"mistral-7b": 14336, "longchat-7b": 14336}
#: memory of the paper's GPU, an L40S with 48 GB, in GiB
L40S_GIB = 44.7


def point_column(name: str, figure: str, scale: float, unit: str, batch: int = 1, **more: Any) -> Column:
    """Return a column of time or memory with prompts as long as QMSum's and the memory of the paper's GPU."""
    return Column(
        name,
        "efficiency",
        figure=figure,
        scale=scale,
        unit=unit,
        prompt=PROMPT,
        prompts=LONG,
        batch=batch,
        memory_gb=L40S_GIB,
        options=(COMPILED,),
        **more,
    )


#: the part of captions that is about points of time and memory
POINTS_CAPTION = """Measured on an H200 with random weights, on which neither time nor memory depends: prompts as long
as QMSum's (3,500 tokens for Llama-2, as LongBench cuts them, and 14,336 for the models of 32k), 128 new tokens,
bfloat16, captured and compiled steps. KVQuant is calibrated on the same random weights, which decides what its
codes stand for, and not their bytes: one per cent of the elements are outliers, as with real ones. Cocktail's chunks
get 16, 4 and 2 bits in the shares 10, 30 and 60 %, searched by BM25, because no chunk of a random prompt resembles the
question."""
