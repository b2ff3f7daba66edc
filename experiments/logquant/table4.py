"""LogQuant, Table 4: the L1 error of attention when tokens are quantized, and when they are dropped."""

from experiments.item import Claim, Computed
from experiments.logquant.attention import FOUR_ON_GSM8K, LLAMA31, OPEN, dropping_is_worse

_L1 = "L1 error"

ITEM = Computed(
    id="logquant/table4",
    number="Table 4",
    title="L1 error of attention: quantization and eviction",
    models=LLAMA31,
    compute="attention:attention_errors",
    options={
        **FOUR_ON_GSM8K,
        "base": "LogQuant (2-bit)",
        "keys": {"model": "Llama3.1-8B", "dataset": "gsm8k"},
        "claims": (
            *dropping_is_worse("dropping a token is worse than quantizing it", _L1),
            Claim("LogQuant's error is smaller than KiVi's (2-bit)", "KiVi (2-bit)", "LogQuant (2-bit)", _L1),
            Claim("LogQuant's error is smaller than KiVi's (eviction)", "KiVi (Eviction)", "LogQuant (Eviction)", _L1),
        ),
    },
    needs="llama3.1-8b-instruct; gsm8k_logquant",
    published="logquant_table4",
    value="l1_error",
    caption=f"""The paper: Llama3.1-8B, GSM8K; it does not define the error. Here: the sum of |p - q| over the tokens,
    summed over all layers and heads, and averaged over decode steps and prompts: at most 2,048 for this model (32
    layers of 32 heads), of which the paper's largest figure is 79 %. {OPEN}""",
)
