"""QuantSpec, Table 3: axes of the groups."""

from experiments.item import Claim, Grid, Model, Row
from experiments.quantspec.table2 import MINI, perplexity

_AXES = ("token", "channel")
_COLUMNS = ("WikiText-2", "bundled texts")


def _setting(group: int, key: str, value: str) -> str:
    keys = "" if group == 128 else f":quantizer.key.group_size={group}"
    values = f":quantizer.value.axis=channel:quantizer.value.group_size={group}" if value == "channel" else ""
    return f"kivi:int4_g128:key_axis={key}:residual=256{keys}{values}"


def _name(value: str, key: str) -> str:
    return f"values per {value}, keys per {key}"


ITEM = Grid(
    id="quantspec/table3",
    number="Table 3",
    title="Axes of the groups of keys and values",
    models=(Model("llama2-7b", "Llama-2-7B"),),
    rows=(
        *(
            Row(
                _name(value, key),
                _setting(128, key, value),
                small=_setting(64, key, value),
                real=_setting(64, key, value),
                published={"value_axis": value, "key_axis": key},
            )
            for value in _AXES
            for key in _AXES
        ),
        Row("FP16", "fp16"),
    ),
    columns=(perplexity("perplexity/wikitext2", "WikiText-2", "wikitext2"),),
    mini=MINI,
    base=_name("token", "channel"),
    published="quantspec_table3",
    value="perplexity",
    claims=tuple(
        Claim(
            f"{column}: values per token and keys per channel are better than {other}",
            other,
            _name("token", "channel"),
            column,
        )
        for column in _COLUMNS
        for other in (_name("token", "token"), _name("channel", "token"), _name("channel", "channel"))
    ),
    caption="""The paper: groups of 128; it states neither the bits (its draft has 4), nor the exact tokens, nor the
    protocol. Here: 4 bits, the newest 256 tokens exact, windows read through the cache token by token. With the bundled
    model groups have 64 elements, its head dimension, and everything is computed in float32.""",
)
