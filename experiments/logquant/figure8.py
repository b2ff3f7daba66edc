"""LogQuant, Figure 8: where quantization and eviction change the distribution of attention."""

from experiments.item import Computed
from experiments.logquant.attention import FOUR_ON_GSM8K, LLAMA31, OPEN, dropping_is_worse

_FAR, _NEAR = "128 and more", "newest 128"

ITEM = Computed(
    id="logquant/figure8",
    number="Figure 8",
    title="Eviction and quantization loss on the attention distribution",
    models=LLAMA31,
    compute="attention:by_distance",
    options={
        **FOUR_ON_GSM8K,
        "base": "",
        "claims": (
            *dropping_is_worse(
                "dropping deviates more than quantizing, also among the newest 128 tokens", "newest 128"
            ),
            *dropping_is_worse("dropping loses the older tokens", _FAR),
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
