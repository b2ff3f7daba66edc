"""QuantSpec, Table 7: acceptance, memory and speed-up of two newer models."""

from experiments.item import Claim, Grid, Model
from experiments.quantspec import common

_MISTRAL, _LLAMA = "mistral-7b-v0.3", "llama3.1-8b"
_CONTEXTS = {16: (_MISTRAL, _LLAMA), 32: (_MISTRAL, _LLAMA), 128: (_LLAMA,)}
_COLUMNS = tuple(
    column
    for context, only in _CONTEXTS.items()
    for column in common.context_columns(
        "multi_lexsum",
        1024 * context,
        {"dataset": "multi_lexsum", "context": f"{context}k"},
        "acceptance_rate",
        1.0,
        only,
    )
)
#: in place of contexts that the model does not read
_BOOKS = tuple(common.books(1024 * context) for context in (1, 2))

ITEM = Grid(
    id="quantspec/table7",
    number="Table 7",
    title="Acceptance, memory and speed-up of newer models",
    models=(Model(_MISTRAL, "Mistral-7B-v0.3"), Model(_LLAMA, "Llama-3.1-8B")),
    rows=(*common.BEST, common.AUTOREGRESSIVE),
    columns=_COLUMNS,
    real=(*_BOOKS, *_COLUMNS),
    mini=(common.MINI_ACCEPTANCE, common.MINI_SPEEDUP, common.MINI_KV),
    no_points=True,
    base=common.AUTOREGRESSIVE.name,
    published="quantspec_table7",
    value="acceptance_rate",
    claims=(
        *common.accepted_more(column.name for column in _BOOKS),
        *common.faster(f"multi_lexsum {context}k" for context in _CONTEXTS),
        *common.less_memory(f"multi_lexsum {context}k" for context in _CONTEXTS if context > 16),
        *(
            Claim(f"QuantSpec is faster than {draft}", "QuantSpec", draft, common.MINI_SPEEDUP.name)
            for draft in common.SPARSE
        ),
    ),
    caption="""The paper: Multi-LexSum, one A6000, the fastest gamma of each method. Here each cell shows its fastest
    gamma.""",
    points_caption=f"""Memory was measured with random weights on one H200: it is the peak of decoding, weights
    included, in GiB (the paper prints GB). At 16k the paper's own QuantSpec takes more memory than sparse drafts, so
    that nothing is claimed there. {common.SPEED_NOTE} {common.FORCED_NOTE}""",
)
