"""QuantSpec, Figure 7: memory of keys and values against weights."""

from experiments.item import Computed, Model

ITEM = Computed(
    id="quantspec/figure7",
    number="Figure 7",
    title="Memory of keys and values against weights and GPUs",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    compute="analytic:cache_against_weights",
    options={"batches": (1, 4, 16), "contexts": (1024, 4096, 16384, 65536, 262144), "gpus": ("h100", "h200")},
    draw="lines",
    x="context, tokens",
    y="memory, GB",
    words=("Keys and values exceed the memory of a single node with eight A100 or H100 of 80 GB (appendix C.2).",),
    caption="""The paper: Llama-2-7B in 16 bits on a node of eight GPUs, as a surface; "At (B = 16, S_L = 262k), the KV
    cache takes up 160x more memory than the model weights". Here: bytes computed from the model's dimensions.""",
)
