"""Forms, bits and maps of layers."""

from __future__ import annotations

import pytest

from kvbench.errors import ConfigError
from kvbench.methods.layer_map import forms
from kvbench.methods.load import load_method
from kvbench.quantizers.engine.formats import FORMATS
from kvbench.tune.space import DEFAULT, Space, check_formats, layer_map, sides_of, tied_layers
from tests.tune.support import space


def test_bits_are_those_of_the_engine_formats_formula() -> None:
    from kvbench.methods.byte_parts import Setting

    every = Space((2, 2), 64, 64, ("fp16", *FORMATS), (1, 1))
    at = Setting(tokens=100, prompt=100, query_heads=4, heads=2, channels=64)
    for form in every.forms:
        method = load_method("fp16") if form == "fp16" else load_method("engine", format=form)
        bits = 8 * method.layer_bytes(at).total / (100 * 2 * 64 * 2)
        assert every.form_bits(form) == pytest.approx(bits, abs=1e-12), form


def test_layers_weigh_as_much_as_they_store() -> None:
    wide = Space((3, 1), 64, 64, ("fp16", "iq4_nl"), (1, 1))
    assert wide.bits(("fp16", "iq4_nl")) == pytest.approx((3 * 16 + 4.5) / 4)
    assert wide.elements == 2 * 64 * 4
    assert wide.cost(("fp16", "iq4_nl")) == wide.capacity((3 * 16 + 4.5) / 4)


def test_tied_positions_expand_to_their_layers() -> None:
    tied = Space((2,) * 8, 64, 64, ("fp16", "iq4_nl"), tied_layers(8, 3))
    assert tied.tied == (2, 3, 3)
    assert tied.expand(("fp16", "iq4_nl", "fp16")) == ("fp16",) * 2 + ("iq4_nl",) * 3 + ("fp16",) * 3
    assert tied.bits(("fp16", "iq4_nl", "fp16")) == pytest.approx((5 * 16 + 3 * 4.5) / 8)


def test_a_layer_map_says_the_same_to_a_method() -> None:
    recipe = ("fp16", "q8_0/iq4_nl", "q8_0/iq4_nl", "octave_k3v3", "fp16")
    assert layer_map(recipe) == "0:fp16,1-2:q8_0/iq4_nl,3:octave_k3v3,4:fp16"
    assert tuple(forms(layer_map(recipe), 5)) == recipe
    method = load_method("engine", layers=layer_map(recipe), format="q8_0")
    assert [type(own).__name__ for own in method.by_layer(5)] == ["FP16", "Engine", "Engine", "Engine", "FP16"]


def test_no_layer_is_half_exact_or_half_octave() -> None:
    for form in space(2, DEFAULT).forms:
        keys, values = sides_of(form)
        assert keys == values or not {keys, values} & {"fp16", "octave_k3v3"}


@pytest.mark.parametrize(
    ("names", "message"),
    [(("fp16", "q8_O"), "is not a format"), (("fp16",), "keys and values can have apart"), (("octave_k3v3",), "apart")],
)
def test_formats_that_cannot_be_searched_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_formats(names)


def test_a_format_that_does_not_fit_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        Space((2,), 48, 48, ("fp16", "q8_0"), (1,))


def test_a_budget_below_the_smallest_format_names_it() -> None:
    space(3).check_budget(4.5)
    with pytest.raises(ConfigError, match=r"--bits=4.4: is below the smallest format: iq4_nl has 4.5 bits"):
        space(3).check_budget(4.4)
    space(3).check_budget(4.5, in_bytes=True)
    with pytest.raises(ConfigError, match=r"--bytes=422.4: is below .* iq4_nl has 432 bytes a token") as raised:
        space(3).check_budget(4.4, in_bytes=True)
    assert "--bytes 432," in str(raised.value)
