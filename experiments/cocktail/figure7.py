"""Cocktail, Figure 7: the thresholds' parameters alpha and beta."""

from experiments.cocktail.common import ALIKE, LLAMA, QMSUM, REAL
from experiments.item import Claim, Grid, Group, Row

_ALPHA, _BETA = (0.2, 0.4, 0.6, 0.8), (0.05, 0.1, 0.2, 0.3)
_MEAN = "Score"


def _row(series: str, alpha: float, beta: float) -> Row:
    changed = (f":alpha={alpha}" if alpha != 0.6 else "") + (f":beta={beta}" if beta != 0.1 else "")
    value = alpha if series == "alpha" else beta
    return Row(
        f"{series} {value}",
        f"cocktail{changed}",
        small=f"cocktail:encoder=bm25{changed}",
        real=f"{REAL}{changed}",
        series=series,
        x=value,
    )


ITEM = Grid(
    id="cocktail/figure7",
    number="Figure 7",
    title="The impact of alpha and beta",
    models=LLAMA,
    rows=(
        *(_row("alpha", alpha, 0.1) for alpha in _ALPHA),
        *(_row("beta", 0.6, beta) for beta in _BETA),
    ),
    columns=(QMSUM,),
    groups=(Group(_MEAN),),
    base="alpha 0.6",
    claims=(
        Claim("a larger alpha is worse (0.2, 0.8)", "alpha 0.2", "alpha 0.8", _MEAN),
        Claim("a larger beta is better (0.3, 0.05)", "beta 0.3", "beta 0.05", _MEAN),
        Claim("from some beta on nothing changes (0.3 within a point of 0.2)", "beta 0.3", "beta 0.2", _MEAN, **ALIKE),
    ),
    draw="sweep",
    y="score, %",
    caption="""The paper: Llama2-7B, QMSum, chunks of 32 tokens; it prints neither its points nor its range. Here:
    alpha from 0.2 to 0.8 at beta 0.1, beta from 0.05 to 0.3 at alpha 0.6.""",
)
