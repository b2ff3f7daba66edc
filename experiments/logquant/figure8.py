"""LogQuant, Figure 8: where quantization and eviction change the distribution of attention."""

from experiments.item import Claim, Computed
from experiments.logquant.attention import FOUR, GSM8K, LLAMA31, OPEN, PROMPTS, STEPS

_FAR, _NEAR = "128 and more", "newest 128"

ITEM = Computed(
    id="logquant/figure8",
    number="Figure 8",
    title="Eviction and quantization loss on the attention distribution",
    models=LLAMA31,
    compute="attention:by_distance",
    options={
        "data": (GSM8K,),
        "settings": FOUR,
        "prompts": PROMPTS,
        "steps": STEPS,
        "base": "",
        "claims": (
            Claim(
                text="dropping deviates more than quantizing, also among the newest 128 tokens (LogQuant)",
                first="LogQuant (Eviction)",
                second="LogQuant (2-bit)",
                column=_NEAR,
            ),
            Claim(
                text="dropping deviates more than quantizing, also among the newest 128 tokens (KiVi)",
                first="KiVi (Eviction)",
                second="KiVi (2-bit)",
                column=_NEAR,
            ),
            Claim(
                text="dropping loses the older tokens (LogQuant)",
                first="LogQuant (Eviction)",
                second="LogQuant (2-bit)",
                column=_FAR,
            ),
            Claim(
                text="dropping loses the older tokens (KiVi)",
                first="KiVi (Eviction)",
                second="KiVi (2-bit)",
                column=_FAR,
            ),
        ),
    },
    needs="llama3.1-8b-instruct; gsm8k_logquant",
    draw="lines",
    x="distance of the token to the query, tokens (from this on)",
    y="L1 error per head, % of its maximum",
    caption=f"""The paper: a drawing of one attention distribution; App. A explains it. Here: the L1 error by
    distance, averaged over layers, heads, decode steps and prompts, as a share of its maximum (2). The tokens 0 and 1
    have columns of their own. {OPEN}""",
)
