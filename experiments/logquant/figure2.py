"""LogQuant, Figure 2: which tokens have high attention changes from step to step."""

from experiments.item import Computed
from experiments.logquant.attention import GSM8K, LLAMA3, OPENBOOKQA, PROMPTS

ITEM = Computed(
    id="logquant/figure2",
    number="Figure 2",
    title="The highest attention of each token in four decode steps",
    models=LLAMA3,
    compute="spikes:spikes_by_step",
    options={"data": (GSM8K, OPENBOOKQA), "prompts": PROMPTS, "steps": 4, "highest": 16, "high": 50.0},
    needs="llama3-8b-instruct; gsm8k_logquant, openbookqa",
    draw="panels",
    words=("Attention scores vary significantly across iterations: earlier steps do not predict them (sec. 3.1).",),
    caption="""The paper: Llama3-8B-Instruct, GSM8K and OpenBookQA, four consecutive decode steps; it marks high
    positions by eye. Here: for each token the highest probability over all layers and heads; the number is the share
    of the 16 highest tokens of a step that are among the 16 highest of the next step as well (tokens 0 and 1 left
    out, and the tokens of the answer). It counts as unpredictable below 50 % (our bound). Drawn are the four steps of
    the first prompt, its 16 highest tokens marked. The model decodes greedily with exact attention.""",
)
