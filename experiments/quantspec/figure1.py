"""QuantSpec, Figure 1: throughput of decoding methods by context."""

from experiments.item import Claim, Column, Grid, Model
from experiments.quantspec import common

_CONTEXTS = (16, 32, 64, 128)
_MINI = Column("throughput", "mini_text", figure="decode_rate", scale=1.0, unit="tokens/s")

ITEM = Grid(
    id="quantspec/figure1",
    number="Figure 1",
    title="Throughput of decoding methods",
    models=(Model("lwm-text-chat-128k", "LWM-Text-Chat-128k"),),
    rows=(common.AUTOREGRESSIVE, *common.BEST),
    columns=tuple(
        Column(
            f"{context}k",
            "efficiency",
            figure="forced_rate",
            prompt=1024 * context,
            batch=1,
            scale=1.0,
            unit="tokens/s",
            digits=1,
            x=1024.0 * context,
        )
        for context in _CONTEXTS
    ),
    mini=(_MINI,),
    no_points=True,
    base=common.AUTOREGRESSIVE.name,
    claims=tuple(
        Claim(
            f"{name}: QuantSpec decodes faster than {second}",
            "QuantSpec",
            second,
            name,
            relative=name != _MINI.name,  # points have no standard error
        )
        for name in (*(f"{context}k" for context in _CONTEXTS), _MINI.name)
        for second in (common.AUTOREGRESSIVE.name, *common.SPARSE)
    ),
    words=("QuantSpec is more than 1.78 times as fast as autoregressive decoding at several context lengths.",),
    draw="bars",
    x="tokens of a prompt",
    y="throughput of decoding, tokens/s",
    caption=f"""The paper: one or two A6000; the figure names neither the data sets nor its points: the lengths of Table
    4 for this model are taken. Throughput is that of decoding, prefill excluded, of one prompt at a time; each bar has
    the fastest gamma. {common.FORCED_NOTE} With the model's weights, Table 4 has the runs. With --models tiny
    --data mini the times are those of a CPU, whose reference path dequantizes: no method can be faster than plain
    decoding there.""",
)
