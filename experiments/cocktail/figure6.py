"""Cocktail, Figure 6: throughput by batch, until memory ends."""

from experiments.cocktail.common import LESS, MODELS, POINTS_CAPTION, RANDOM_KVQUANT, TIMED_METHODS, point_column
from experiments.item import Claim, Grid

_BATCHES = (1, 2, 4, 5, 10, 12, 16, 18, 28, 32, 40, 48, 96)

ITEM = Grid(
    id="cocktail/figure6",
    number="Figure 6",
    title="Throughput by batch",
    models=MODELS,
    rows=TIMED_METHODS,
    columns=tuple(
        point_column(f"batch {batch}", "tokens_per_s", 1.0, "tokens/s", batch, digits=1, x=float(batch))
        for batch in _BATCHES
    ),
    base="FP16",
    claims=(
        Claim(
            "at batch 1, the search makes Cocktail slower than KIVI (INT4)", "Cocktail", "KIVI INT4", "batch 1", **LESS
        ),
        *(
            Claim(
                f"at batch {batch}, Cocktail's throughput is above that of {name}",
                "Cocktail",
                name,
                f"batch {batch}",
                relative=True,
            )
            for batch, name in ((4, "KIVI INT4"), (16, "KIVI INT4"), (4, "Atom INT2"), (4, RANDOM_KVQUANT))
        ),
    ),
    words=("Lines end where memory does (48 GB).",),
    draw="lines",
    x="batch",
    y="throughput, tokens/s",
    caption=f"""The paper: QMSum, answers of 128 tokens, one L40S (48 GB); its points are not printed, nor the batch
    from which on Cocktail is ahead: 4 and 16 are ours. Here: tokens per second with search and prefill inside, in 44.7
    GiB (48 GB); the batches differ by model, and a cross ends a line where a batch did not fit. FP16 of Llama2-7B at
    batch 1 has the first prefill of its process in its time (0.58 s in place of 0.10): without it, it is about as fast
    as the others. {POINTS_CAPTION}""",
)
