"""QuantSpec, Table 4: acceptance, memory and speed-up of two models."""

from experiments.item import Claim, Grid, Model
from experiments.quantspec import common

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
    for column in common.context_columns(
        data, 1024 * context, {"dataset": data, "context": f"{context}k"}, "acceptance_rate_pct", 100.0, (model,)
    )
)

ITEM = Grid(
    id="quantspec/table4",
    number="Table 4",
    title="Acceptance, memory and speed-up",
    models=(Model(_LLAMA, "Llama-2-7B-32K-Instruct"), Model(_LWM, "LWM-Text-Chat-128k")),
    rows=(*common.BEST, common.AUTOREGRESSIVE),
    columns=COLUMNS,
    mini=(common.MINI_ACCEPTANCE, common.MINI_SPEEDUP, common.MINI_KV),
    no_points=True,
    base=common.AUTOREGRESSIVE.name,
    published="quantspec_table4",
    value="acceptance_rate_pct",
    claims=(
        *common.accepted_more(f"pg19 {context}k: acceptance" for context in (4, 8)),
        *common.faster(f"{data} {context}k" for data, context, _ in _PLACES),
        *common.less_memory(f"{data} {context}k" for data, context, _ in _PLACES if context > 4),
        *(
            Claim(f"{name}: QuantSpec above {draft}", "QuantSpec", draft, name)
            for name in (common.MINI_ACCEPTANCE.name, common.MINI_SPEEDUP.name)
            for draft in common.SPARSE
        ),
    ),
    words=("Against sparse drafts QuantSpec needs 1.3 times less memory (abstract).",),
    caption="""The paper: ten prompts each, answers of 90 tokens, batch 1, one or two A6000; sparse drafts hold a
    quarter of the context; each cell has the gamma that is fastest in a search at 8k (Table 6). Here each cell shows
    the fastest gamma of that cell.""",
    points_caption=f"""Memory was measured with random weights on one H200: it is the peak of decoding,
    weights included, in GiB (the paper prints GB); our cache's buffers are bfloat16. At 4k the paper's own QuantSpec
    takes more memory than sparse drafts, so that nothing is claimed there. The paper's draft has 4-bit weights of its
    own; so has ours. {common.SPEED_NOTE} {common.FORCED_NOTE}""",
)
