"""QuantSpec, Figure 5: what quantized weights and a quantized cache bring, by context."""

from experiments.item import Computed, Model
from experiments.quantspec.common import FORCED_NOTE

ITEM = Computed(
    id="quantspec/figure5",
    number="Figure 5",
    title="Speed-up of QuantSpec with quantized weights, cache, or both",
    models=(Model("llama2-7b-32k-instruct", "Llama-2-7B-32K-Instruct"),),
    compute="forced:shares_of_speed",
    options={"gpu": "a6000", "contexts": tuple(2**n for n in range(10, 18))},
    draw="lines",
    x="context, tokens",
    y="speed-up over plain decoding",
    words=(
        "Short contexts: most of the speed-up comes from weights; long ones: from keys and values; between: from both.",
    ),
    caption=f"""The paper: measured on PG-19 with one A6000; its points are not printed. Here: measured at some lengths,
    and predicted on an A6000 at all of them, by a roofline with the bytes of QuantSpec's caches (drafts read the upper
    nibbles and 4-bit weights, the target both nibbles and 16-bit weights). {FORCED_NOTE} To measure with the model's
    weights: python -m kvbench --multirun setting=fp16,quantspec,
    quantspec:target=fp16:draft=full:draft_weights=int4_all,quantspec:draft_weights=int4_all
    model=llama2-7b-32k-instruct dataset=pg19 dataset.lengths=[4096,8192,16384,32768].""",
)
