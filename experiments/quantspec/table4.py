"""QuantSpec, Table 4: acceptance, memory and speed-up of two models."""

from experiments.item import Claim, Grid, Model
from experiments.quantspec.common import (
    AUTOREGRESSIVE,
    BEST,
    FORCED_NOTE,
    MINI_ACCEPTANCE,
    MINI_KV,
    MINI_SPEEDUP,
    SPARSE,
    SPEED_NOTE,
    context_columns,
    faster,
    less_memory,
)

_LLAMA, _LWM = "llama2-7b-32k-instruct", "lwm-text-chat-128k"
_PLACES = (
    ("pg19", 4, _LLAMA),
    ("pg19", 8, _LLAMA),
    ("multi_lexsum", 8, _LLAMA),
    ("multi_lexsum", 32, _LLAMA),
    ("infinitebench_sum", 16, _LWM),
    ("infinitebench_sum", 32, _LWM),
    ("multi_lexsum", 64, _LWM),
    ("multi_lexsum", 128, _LWM),
)
COLUMNS = tuple(
    column
    for data, context, model in _PLACES
    for column in context_columns(
        data, 1024 * context, {"dataset": data, "context": f"{context}k"}, "acceptance_rate_pct", 100.0, (model,)
    )
)

ITEM = Grid(
    id="quantspec/table4",
    number="Table 4",
    title="Acceptance, memory and speed-up",
    models=(Model(_LLAMA, "Llama-2-7B-32K-Instruct"), Model(_LWM, "LWM-Text-Chat-128k")),
    rows=(*BEST, AUTOREGRESSIVE),
    columns=COLUMNS,
    mini=(MINI_ACCEPTANCE, MINI_SPEEDUP, MINI_KV),
    no_points=True,
    base=AUTOREGRESSIVE.name,
    published="quantspec_table4",
    value="acceptance_rate_pct",
    claims=(
        *faster(f"{data} {context}k" for data, context, _ in _PLACES),
        *less_memory(f"{data} {context}k" for data, context, _ in _PLACES if context > 4),
        *(
            Claim(
                text=f"{name}: QuantSpec above {draft}",
                first="QuantSpec",
                second=draft,
                column=name,
            )
            for name in (MINI_ACCEPTANCE.name, MINI_SPEEDUP.name)
            for draft in SPARSE
        ),
    ),
    words=("Against sparse drafts QuantSpec needs 1.3 times less memory (abstract).",),
    caption=f"""The paper: ten prompts each, answers of 90 tokens, batch 1, one or two A6000; sparse drafts hold a
    quarter of the context; each cell has the gamma that is fastest in a search at 8k (Table 6). Here each cell shows
    the fastest gamma of that cell. Memory was measured with random weights on one H200: it is the peak of decoding,
    weights included, in GiB (the paper prints GB); our cache's buffers are bfloat16. At 4k the paper's own QuantSpec
    takes more memory than sparse drafts, so that nothing is claimed there. The paper's draft has 4-bit weights of its
    own; so has ours. {SPEED_NOTE} {FORCED_NOTE}""",
)
