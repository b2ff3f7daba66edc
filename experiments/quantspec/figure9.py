"""QuantSpec, Figure 9: acceptance by speculation length."""

from experiments.item import Claim, Column, Grid, Group, Model, Row
from experiments.quantspec.common import GAMMAS, MINI_ACCEPTANCE, SPARSE, books, setting

_LENGTHS = (1, 2, 3, 4, 6)
_MEAN = "Acceptance"

ITEM = Grid(
    id="quantspec/figure9",
    number="Figure 9",
    title="Acceptance by speculation length",
    models=(Model("lwm-text-chat-128k", "LWM-Text-Chat-128k"),),
    rows=tuple(
        Row(f"{draft}, gamma {gamma}", setting(draft, gamma), series=draft, x=float(gamma))
        for draft in GAMMAS
        for gamma in _LENGTHS
    ),
    columns=(
        Column("Multi-LexSum", "multi_lexsum", options=("dataset.lengths=[8192]",), figure="acceptance", scale=100.0),
    ),
    groups=(Group(_MEAN),),
    mini=(MINI_ACCEPTANCE,),
    real=(books(8192),),
    claims=tuple(
        Claim(
            f"at gamma {gamma}, QuantSpec's drafts are accepted more often than {draft}'s",
            f"QuantSpec, gamma {gamma}",
            f"{draft}, gamma {gamma}",
            _MEAN,
        )
        for gamma in _LENGTHS
        for draft in SPARSE
    ),
    words=("The longer the speculation, the faster the acceptance of sparse drafts falls (appendix H).",),
    draw="sweep",
    x="speculation length gamma",
    y="accepted drafts, %",
    caption="""The paper: Multi-LexSum; it prints neither its points nor its context. Here: prompts of 8192 tokens,
    those of its Table 6. With --data real: books, because no document at hand has as many tokens.""",
)
