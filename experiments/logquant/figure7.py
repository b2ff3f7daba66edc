"""LogQuant, Figure 7: memory and throughput by batch, until memory ends."""

from experiments.data import COMPILED
from experiments.item import Claim, Column, Grid, Group, Model, Row

_BATCHES = (1, 2, 4, 64, 96, 100, 104, 192, 256, 340, 348, 440)
_BEST, _MOST = "best throughput", "largest batch"


def _batch_columns(figure: str, scale: float, unit: str, digits: int) -> tuple[Column, ...]:
    what = {"tokens_per_s": "throughput", "peak": "peak GPU memory"}[figure]
    return tuple(
        Column(
            f"{what}, batch {batch}",
            "efficiency",
            figure=figure,
            scale=scale,
            unit=unit,
            digits=digits,
            prompt=512,
            batch=batch,
            new_tokens=2000,
            memory_gb=48.0,
            options=(COMPILED,),
            x=float(batch),
            panel=f"{what}, {unit}",
        )
        for batch in _BATCHES
    )


_RATES = _batch_columns("tokens_per_s", 1.0, "tokens/s", 0)

ITEM = Grid(
    id="logquant/figure7",
    number="Figure 7",
    title="Memory and throughput by batch",
    models=(Model("llama3.1-8b", "Llama-3.1-8B"),),
    rows=(
        Row("BF16", "fp16"),
        Row("LogQuant (2-bit)", "logquant:reserved=126"),
        Row("LogQuant (2-bit), W = 64", "logquant:int2_g128:window=64:reserved=192"),
    ),
    columns=(*_RATES, *_batch_columns("peak", 2**-30, "GiB", 1)),
    groups=(
        Group(_BEST, columns=tuple(c.name for c in _RATES), mini=tuple(c.name for c in _RATES), pick="largest"),
        Group(
            _MOST,
            columns=tuple(c.name for c in _RATES),
            mini=tuple(c.name for c in _RATES),
            pick="last",
            unit="sequences",
        ),
    ),
    base="BF16",
    claims=tuple(
        Claim(f"{name}: {text}", name, "BF16", column, low=low, relative=True)
        for name in ("LogQuant (2-bit)", "LogQuant (2-bit), W = 64")
        for text, column, low in (
            ("at least 25 % more throughput", _BEST, "throughput gain vs BF16, HF pipeline, 48 GB"),
            ("at least 60 % larger batch", _MOST, "batch size gain at the same memory"),
        )
    ),
    draw="lines",
    x="batch",
    y="throughput, tokens/s",
    caption="""The paper: Llama-3.1-8B, prompts of 512 tokens, up to 2,000 new ones, 126 reserved tokens (W = 42), 48 GB
    of an H100, the generation pipeline of transformers; its points are not printed. Here: an H200 with at most 48 GiB,
    random weights, on which neither time nor memory depends, captured and compiled steps, prefill included. The batches
    tried differ between the rows: the largest is the last that fitted. Groups of W = 64 tokens fit the tiles of the
    fastest kernel. With W = 42, batches of 96 and 192 are from before the CUDA kernel read such groups: Triton's did,
    which is slower.""",
)
