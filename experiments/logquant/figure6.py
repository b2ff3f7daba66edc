"""LogQuant, Figure 6: accuracy on GSM8K by compression ratio."""

from experiments.item import MINI, Claim, Column, Grid, Group, Model, Row
from experiments.logquant.common import ANSWER, GSM8K, GSM8K_FLIPS, GSM8K_KL, KIVI_NOTE, closer

_RATIO = Column("compression ratio", GSM8K.data, options=GSM8K.options, figure="compression", scale=1.0, unit="x")
_MINI_RATIO = Column(_RATIO.name, "mini", figure="compression", scale=1.0, unit="x")
_MEAN = "Accuracy"
_KEPT = (128, 192, 256)


def _window_rows(name: str, setting: str) -> tuple[Row, ...]:
    return tuple(Row(f"{name}, R {exact}", setting.format(exact), series=name) for exact in _KEPT)


ITEM = Grid(
    id="logquant/figure6",
    number="Figure 6",
    title="Accuracy by compression ratio",
    models=(
        Model("llama3.1-8b-instruct", "Llama3.1-8B-Instruct"),
        Model("qwen2-7b-instruct", "Qwen2-7B-Instruct"),
        Model("phi3-mini-128k-instruct", "Phi-3-mini-128k-instruct"),
    ),
    rows=(
        Row("baseline", "fp16"),
        *_window_rows("KiVi", "hf_quantized:residual={}"),
        *_window_rows("KIVI", "kivi:int2:residual={}"),
        *_window_rows("LogQuant", "logquant:reserved={}"),
        *_window_rows("PartialLogQuant", "partial_logquant:reserved={}"),
    ),
    columns=(GSM8K, _RATIO),
    real=(GSM8K, GSM8K_KL, GSM8K_FLIPS, _RATIO),
    groups=(Group(_MEAN, columns=(GSM8K.name,), mini=tuple(column.name for column in MINI)),),
    mini=(*MINI, _MINI_RATIO),
    base="baseline",
    along=_RATIO.name,
    claims=tuple(
        Claim(
            f"LogQuant is better than {other} with {exact} exact tokens",
            f"LogQuant, R {exact}",
            f"{other}, R {exact}",
            _MEAN,
        )
        for exact in _KEPT
        for other in ("KiVi", "KIVI")
    )
    # KiVi's KL is one measurement for all three (the caption says why), and counts once
    + (closer(f"LogQuant, R {_KEPT[0]}", f"KiVi, R {_KEPT[0]}"),)
    + tuple(closer(f"LogQuant, R {exact}", f"KIVI, R {exact}") for exact in _KEPT),
    words=(
        "At higher ratios PartialLogQuant is better than LogQuant (sec. 4.2.2).",
        "The smaller models, and those with few KV heads, lose most at 2 bits (sec. 4.2.2).",
    ),
    draw="sweep",
    x="compression ratio (bytes of fp16 / bytes used)",
    y="score, %",
    caption=f"""The paper: GSM8K, three families of models, 128, 192 and 256 exact tokens; its points are not printed,
    and its ratio, 16 L / (2 (L - R) + 16 R), leaves out scales and zero points. Here: the ratio of the bytes that the
    cache holds, all parts included. KL and flips are over answers of {ANSWER} tokens: KiVi packs the whole prompt and
    keeps the tokens behind it until there are R of them, so that with 128 or more it packs none of an answer, and its
    KL is the same for every R. The claim of KL against it is judged at the first R alone. {KIVI_NOTE}""",
)
