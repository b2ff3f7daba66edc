"""QuantSpec, Figure 2: intensity of decoding by context and batch."""

from experiments.item import Computed, Model

ITEM = Computed(
    id="quantspec/figure2",
    number="Figure 2",
    title="Arithmetic intensity of decoding",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    compute="analytic:decoding",
    options={
        "gpu": "a6000",
        "batches": (1, 4, 16, 64),
        "contexts": (1024, 4096, 16384, 65536, 262144),
        "new_tokens": 1000,
    },
    draw="lines",
    x="context, tokens",
    y="FLOPs per byte",
    words=("For small batches and short contexts linear layers take most of the time, else attention (shares below).",),
    caption="""The paper: Llama-2-7B in 16 bits, 1k new tokens, ridge plane of an A6000, as surfaces; its points are not
    printed. Here: FLOPs and bytes counted from the model's dimensions (every step reads all weights and all keys and
    values), as lines; no measurement.""",
)
