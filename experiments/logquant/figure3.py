"""LogQuant, Figure 3: the attention of the first tokens against that of the newest 128."""

from experiments.item import Computed
from experiments.logquant.attention import GSM8K, LLAMA3, OPEN, PROMPTS, STEPS

ITEM = Computed(
    id="logquant/figure3",
    number="Figure 3",
    title="Attention of the sinks and of the newest 128 tokens",
    models=LLAMA3,
    compute="spikes:sinks",
    options={"data": (GSM8K,), "prompts": PROMPTS, "steps": STEPS, "newest": 128},
    needs="llama3-8b-instruct; gsm8k_logquant",
    draw="boxes",
    x="tokens",
    y="attention probability (sum)",
    words=("The median of the sinks (tokens 0 and 1) exceeds the sum of the most recent 128 tokens (sec. 3.1).",),
    caption=f"""The paper: Llama3-8B-Instruct, GSM8K, box plots over all heads. Here: the same; a head's figure is its
    mean over decode steps and prompts. {OPEN}""",
)
