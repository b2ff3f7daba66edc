"""QuantSpec, Table 1: asymptotic intensity of prefill and decoding, evaluated."""

from experiments.item import Computed, Model

ITEM = Computed(
    id="quantspec/table1",
    number="Table 1",
    title="Asymptotic analysis of arithmetic intensity, evaluated",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    compute="analytic:asymptotics",
    options={"batches": (1, 16), "contexts": (64, 131072), "new_tokens": 1000},
    words=("The cells of the paper are orders, O(...): the limits are its last row of each phase, with the factor 1.",),
    caption="""The paper: FLOPs, memory operations and their ratio by linear layers, attention and both together, as
    orders in batch B, length S, width d and k new tokens; no model. Here: the terms with the factor 1, for the width of
    Llama-2-7B (d = 4096) and k = 1000, once with S far below d and once with S far above it. Where a
    ratio has two terms of one size, a value lies up to a factor 2 from its limit.""",
)
