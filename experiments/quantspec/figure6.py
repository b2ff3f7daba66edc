"""QuantSpec, Figure 6: intensity of prefill by context and batch."""

from experiments.item import Computed, Model

ITEM = Computed(
    id="quantspec/figure6",
    number="Figure 6",
    title="Arithmetic intensity of prefill",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    compute="analytic:prefill",
    options={"gpu": "a6000", "batches": (1, 4, 16, 64), "contexts": (1024, 4096, 16384, 65536, 262144)},
    draw="lines",
    x="context, tokens",
    y="FLOPs per byte",
    words=("All regimes lie above the ridge plane and are compute-bound (appendix C.1).",),
    caption="""The paper: Llama-2-7B in 16 bits, ridge plane of an A6000, as surfaces; its points are not printed. Here:
    FLOPs and bytes counted from the model's dimensions (FlashAttention: queries, keys, values and outputs are moved
    once), as lines; no measurement.""",
)
