"""QuantSpec, Table 6: the search over gamma."""

from experiments.item import Claim, Column, Grid, Model
from experiments.quantspec.common import AUTOREGRESSIVE, MINI_ACCEPTANCE, MINI_SPEEDUP, SPEED_NOTE, SWEPT

_LLAMA, _LWM = "llama2-7b-32k-instruct", "lwm-text-chat-128k"
_DATA = {"pg19": (_LLAMA,), "multi_lexsum": (_LLAMA, _LWM), "infinitebench_sum": (_LWM,)}


def _dataset_columns(data: str, only: tuple[str, ...]) -> tuple[Column, Column]:
    shared = {"data": data, "options": ("dataset.lengths=[8192]",), "only": only}
    return (
        Column(f"{data}: acceptance", figure="acceptance", scale=100.0, published={"dataset": data}, **shared),
        Column(f"{data}: speed-up", figure="seconds_per_token", scale=1.0, unit="x", inverse=True, **shared),
    )


ITEM = Grid(
    id="quantspec/table6",
    number="Table 6",
    title="Search over gamma",
    models=(Model(_LLAMA, "Llama-2-7B-32K"), Model(_LWM, "LWM-Text-Chat-128k")),
    rows=(*SWEPT, AUTOREGRESSIVE),
    columns=tuple(column for data, only in _DATA.items() for column in _dataset_columns(data, only)),
    mini=(MINI_ACCEPTANCE, MINI_SPEEDUP),
    base=AUTOREGRESSIVE.name,
    published="quantspec_table6",
    value="acceptance_rate_pct",
    claims=tuple(
        Claim(
            f"{column}: {draft}'s acceptance falls from gamma {low} to {high}",
            f"{draft}, gamma {low}",
            f"{draft}, gamma {high}",
            column,
        )
        for column in (*(f"{data}: acceptance" for data in _DATA), MINI_ACCEPTANCE.name)
        for draft, low, high in (("StreamingLLM", 1, 3), ("SnapKV", 1, 3), ("QuantSpec", 1, 6))
    ),
    words=(
        "Sparse drafts are fastest at gamma 1, QuantSpec usually at 4 or 6 (appendix G; with PG-19 its numbers say 2).",
    ),
    caption="""The paper: prompts of 8192 tokens, answers of 90. What it calls "speedup" here is, by its size, tokens
    per second: those numbers are not set beside our ratios.""",
    points_caption=SPEED_NOTE,
)
