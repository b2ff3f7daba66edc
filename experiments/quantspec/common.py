"""The drafts, models and columns that QuantSpec's items share."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.item import Claim, Column, Row

#: speculation lengths of the paper's search (Table 6)
GAMMAS = {"StreamingLLM": (1, 2, 3), "SnapKV": (1, 2, 3), "QuantSpec": (1, 2, 4, 6)}
_DRAFTS = {
    "StreamingLLM": "quantspec:gamma={}:draft=streamingllm:target=fp16",
    "SnapKV": "quantspec:gamma={}:draft=snapkv:target=fp16",
    "QuantSpec": "quantspec:gamma={}:draft_weights=int4",
}
SPARSE = ("StreamingLLM", "SnapKV")
#: name of the columns with speed-ups that were measured with random weights
FORCED = "speed-up, acceptance forced"

#: autoregressive decoding of the target, in full precision
AUTOREGRESSIVE = Row("AR (fp16)", "fp16")


def setting(draft: str, gamma: int) -> str:
    """Return the setting of a draft with a speculation length."""
    return _DRAFTS[draft].format(gamma)


#: gamma of the points of memory, on which it has next to no influence
_POINTS = {"StreamingLLM": 1, "SnapKV": 1, "QuantSpec": 4}
#: each draft with the speculation length that is fastest in each cell
BEST = tuple(
    Row(
        draft,
        setting(draft, _POINTS[draft]),
        choices=tuple(setting(draft, gamma) for gamma in gammas),
        published={"method": draft},
    )
    for draft, gammas in GAMMAS.items()
)
#: each draft with each speculation length
SWEPT = tuple(
    Row(
        f"{draft}, gamma {gamma}",
        setting(draft, gamma),
        series=draft,
        x=float(gamma),
        published={"method": draft, "gamma": str(gamma)},
    )
    for draft, gammas in GAMMAS.items()
    for gamma in gammas
)


def context_columns(
    data: str, context: int, published: Mapping[str, str], acceptance: str, scale: float, only: tuple[str, ...] = ()
) -> tuple[Column, ...]:
    """Return the columns of acceptance, memory and speed-up of a data set and a context.

    The last one is the speed-up at a forced acceptance, with random weights; it does not depend on the data set.

    Args:
        data: choice of ``conf/dataset``.
        context: tokens of a prompt.
        published: keys of the published CSV.
        acceptance: its column with the acceptance rate.
        scale: 100 if that rate is in percent.
        only: presets of the models that have the cell.
    """
    where = f"{data} {context // 1024}k"
    answers = {"data": data, "options": (f"dataset.lengths=[{context}]",)}
    points = {"data": "efficiency", "prompt": context, "batch": 1}
    times = {"scale": 1.0, "unit": "x", "value": "speedup_vs_ar"}
    rates = {"scale": scale, "unit": "%" if scale == 100 else "", "value": acceptance}
    sizes = {"scale": 2**-30, "unit": "GiB", "value": "peak_gpu_memory_gb", "new_tokens": 90}
    figures: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("acceptance", "acceptance", answers | rates),
        ("peak memory", "peak_decode", points | sizes),
        ("speed-up", "seconds_per_token", answers | times | {"inverse": True}),
        (FORCED, "forced_speedup", points | times),
    )
    return tuple(
        Column(f"{where}: {name}", figure=figure, published=published, only=only, **more)
        for name, figure, more in figures
    )


def faster(places: Iterable[str]) -> tuple[Claim, ...]:
    """Return the claims that QuantSpec is faster than sparse drafts: with the data, and at equal acceptance."""
    return tuple(
        Claim(
            f"{place}: QuantSpec is faster than {draft}{words}",
            "QuantSpec",
            draft,
            f"{place}: {column}",
            relative=column == FORCED,  # points have no standard error
        )
        for place in dict.fromkeys(places)
        for column, words in (("speed-up", ""), (FORCED, " at equal acceptance"))
        for draft in SPARSE
    )


def accepted_more(columns: Iterable[str]) -> tuple[Claim, ...]:
    """Return the claims that QuantSpec's drafts are accepted more often than sparse ones, in columns of acceptance."""
    return tuple(
        Claim(f"{column}: QuantSpec above {draft}", "QuantSpec", draft, column)
        for column in columns
        for draft in SPARSE
    )


def books(context: int) -> Column:
    """Return the column of acceptance on books, of which every context can be cut: for ``--data real``."""
    name, options = f"books {context // 1024}k: acceptance", (f"dataset.lengths=[{context}]",)
    return Column(name, "pg19", options=options, figure="acceptance", scale=100.0, x=float(context))


def less_memory(places: Iterable[str]) -> tuple[Claim, ...]:
    """Return the claims that QuantSpec's peak is below that of the sparse drafts, at each place (``pg19 4k``)."""
    return tuple(
        Claim(
            f"{place}: QuantSpec takes less memory than {draft}",
            "QuantSpec",
            draft,
            f"{place}: peak memory",
            low=-100.0,
            high=0.0,
            relative=True,
        )
        for place in dict.fromkeys(places)
        for draft in SPARSE
    )


#: the bundled texts in place of the paper's: ten prompts of 2,048 tokens
MINI_ACCEPTANCE = Column("acceptance", "mini_text", figure="acceptance", scale=100.0)
MINI_SPEEDUP = Column("speed-up", "mini_text", figure="seconds_per_token", scale=1.0, unit="x", inverse=True)
MINI_KV = Column("KV, target and draft", "mini_text", figure="kv_mib", scale=1.0, unit="MiB")

SPEED_NOTE = """Speed-ups are over autoregressive decoding of the same model in full precision, on the machine that ran
    both."""

FORCED_NOTE = """Speeds at a forced acceptance were measured on one H200 with random weights (results/h200/speculation):
    each draft is accepted by chance with probability 0.9, the same for all drafts and data sets, and the text is
    meaningless. Steps and rounds are captured and compiled, each row has its best gamma, QuantSpec's draft has all
    weights in 4 bits (int4_all), and the sparse drafts have the target's weights."""
