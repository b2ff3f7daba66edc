"""LogQuant, Figure 4: how much attention the tokens that a method would keep exact receive."""

from experiments.item import Claim, Computed
from experiments.logquant.attention import GSM8K, PROMPTS, THREE

_LENGTHS = (128, 192, 256)

ITEM = Computed(
    id="logquant/figure4",
    number="Figure 4",
    title="Attention coverage of the selection methods",
    models=THREE,
    compute="attention:coverage",
    options={
        "data": (GSM8K,),
        "settings": {
            "LogQuant": "logquant:reserved={R}",
            "KiVi": "streamingllm:sinks=0:budget={R}",
            "Streaming": "streamingllm:budget={R4}",
            "H2O": "h2o:budget={R}:recent=0",
        },
        "lengths": _LENGTHS,
        "prompts": PROMPTS,
        "steps": 4,
        "base": "LogQuant",
        "claims": tuple(
            Claim(f"LogQuant covers more than {other}{words}", "LogQuant", other, column)
            for column, words in (("R = 128", " (per token held)"), ("R = 128, eq. 2", " (eq. 2)"))
            for other in ("KiVi", "Streaming", "H2O")
        ),
    },
    needs="llama3-8b-instruct, qwen2-7b-instruct, phi3-mini-128k-instruct; gsm8k_logquant",
    draw="lines",
    x="reserved length, tokens",
    y="attention per reserved token, 1e-3",
    caption="""The paper: three models, a subset of GSM8K, the tokens 0 and 1 left out; it selects 3W tokens by each
    method's rule and divides their attention by 3W (sec. 3.2, eq. 2). LogQuant's algorithm holds between 2W and 3W
    tokens, the others R, and fewer tokens get more attention each: so there are two columns, divided by the number
    held at that step (drawn) and by 3W (eq. 2). KiVi is the newest R tokens, as in sec. 3.2 (its own window would
    move between 0 and R); Streaming holds four sinks in addition; H2O selects all R tokens by the attention received
    so far. At most 50 prompts, up to 4 tokens of each answer.""",
)
