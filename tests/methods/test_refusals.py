"""Which quantizers a method accepts, and what is said of others."""

from __future__ import annotations

import pytest
import yaml

from kvbench.errors import ConfigError
from kvbench.methods.refusals import check_taken
from kvbench.util.confdir import group_options
from kvbench.util.schema import field_names, load_class

PACKS, REFUSED = "Mine packs keys and values, so it needs a quantizer", "method mine does not accept this quantizer"


def test_widths_are_keys_of_their_methods() -> None:
    named = {}
    for name in group_options("method"):
        method = load_class(
            "method._target_", yaml.safe_load(group_options("method")[name].read_text())["_target_"], ""
        )
        named[name] = method.widths
        assert set(method.widths) <= set(field_names(method))
    own = {name: keys for name, keys in named.items() if keys}
    assert set(own) == {"cocktail", "engine", "hf_quantized", "kvquant", "turboquant"}


@pytest.mark.parametrize(
    ("takes", "quantizer", "needed"),
    [
        (("int4", "none"), "int4", True),
        (("none", "int4"), "int4", True),
        (("int4", "none"), "none", False),
        (("none",), "none", False),
        (("int4",), "int4+key.bits=8", True),  # its preset counts
    ],
)
def test_what_is_accepted(takes: tuple[str, ...], quantizer: str, needed: bool) -> None:
    check_taken("Mine", takes, quantizer, needed)


@pytest.mark.parametrize(
    ("takes", "quantizer", "needed", "problem", "hint"),
    [
        (("none", "int4"), "none", True, PACKS, "hint: set quantizer=int4"),
        (("int4",), "none", True, REFUSED, "hint: set quantizer=int4"),
        (("none", "int4"), "int2", False, REFUSED, "hint: set quantizer=none"),
        (("none", "int4"), "int2", True, REFUSED, "hint: set quantizer=int4"),
        ((), "int2", False, REFUSED, "add takes: [int2] to the YAML of method=mine"),
        (("none",), "int2", True, REFUSED, "add takes: [int2, ...] to the YAML of method=mine (from Python"),
        ((), "none", True, REFUSED, "add takes: [int4_token, ...] to the YAML of method=mine, and choose quantizer="),
        (("none",), "none", True, PACKS, "and choose quantizer=int4_token (from Python"),
    ],
)
def test_what_is_refused(takes: tuple[str, ...], quantizer: str, needed: bool, problem: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_taken("Mine", takes, quantizer, needed)
    assert problem in str(caught.value) and hint in str(caught.value)
