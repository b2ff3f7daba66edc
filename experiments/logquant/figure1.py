"""LogQuant, Figure 1: attention spikes become sparser with distance."""

from experiments.item import Computed
from experiments.logquant.attention import GSM8K, LLAMA3, OPEN, PROMPTS, STEPS

ITEM = Computed(
    id="logquant/figure1",
    number="Figure 1",
    title="Log-distributed attention spikes",
    models=LLAMA3,
    compute="spikes:density",
    options={"data": (GSM8K,), "prompts": PROMPTS, "steps": STEPS, "low": -1.5, "high": -0.5},
    needs="llama3-8b-instruct; gsm8k_logquant",
    draw="panels",
    words=("The positions of attention spikes follow a log distribution: sparser, the further away (sec. 1, 3.2).",),
    caption=f"""The paper: Llama3-8B-Instruct, GSM8K; it draws attention scores by position and defines no spike.
    Here: a token is a spike of a head if it gets more than 10 times the mean probability of the visible tokens;
    tokens 0 and 1 are left out. The exponent is that of a power of the distance, fitted to the spikes per visible
    token in bins of doubling distance: -1 is a log distribution (as many spikes in each doubling), 0 an even one. Its
    standard error is a jackknife over prompts. It counts as a log distribution between -1.5 and -0.5 (our bounds).
    {OPEN}""",
)
