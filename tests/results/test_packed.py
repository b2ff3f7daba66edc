"""Long lists of a row are packed without loss, and damage is found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbench.results.packed import SHORTEST, packed_row, short_floats, unpacked_row
from kvbench.results.samples import decode_row, encode_row

PLAIN = {"id": "t/0", "task": "t", "prediction": "", "scores": {}, "scorer_version": 1}
NUMBERS = np.random.default_rng(0).standard_normal(2 * SHORTEST) * np.geomspace(1e-12, 10, 2 * SHORTEST)


def test_rounding_is_to_the_nearest_of_12_bits() -> None:
    rounded = np.array(short_floats([*NUMBERS, 0.0, 1.0, -2.5]))
    assert np.abs(rounded[:-3] / NUMBERS - 1).max() < 2.0**-12
    assert rounded[-3:].tolist() == [0.0, 1.0, -2.5] and short_floats(rounded.tolist()) == rounded.tolist()
    assert abs(np.mean(np.abs(rounded[:-3]) / np.abs(NUMBERS)) - 1) < 1e-5  # neither up nor down on the whole


def test_a_long_row_is_small_and_comes_back_as_it_was() -> None:
    part = {"mode": "decode", "left": {"at": 3}, "other_top": [5], "kld": short_floats(NUMBERS), "nll": [0.1, 0.2]}
    line = encode_row({**PLAIN, "fidelity": part})
    assert decode_row(line) == {**PLAIN, "fidelity": part}
    assert len(line) < 4 * len(NUMBERS) < len(json.dumps(part["kld"])) / 3


def test_eight_thousand_tokens_take_14_bytes_each() -> None:
    """Five figures a position, as random as measured ones: docs/fidelity.md names this size."""
    draw, count = np.random.default_rng(1), 8000
    part = {
        "kld": np.exp(draw.normal(-9, 3, count)),
        "change": draw.normal(0, 1e-3, count),
        "nll_base": draw.exponential(0.3, count),
        "nll": draw.exponential(0.3, count),
        "top_mass": 1 - np.exp(draw.normal(-6, 2, count)),
    }
    line = encode_row({**PLAIN, "fidelity": {name: short_floats(numbers) for name, numbers in part.items()}})
    plain = json.dumps({name: [float(f"{x:.9g}") for x in numbers] for name, numbers in part.items()})
    assert len(line) < 14 * count < len(plain) / 5


def test_what_would_not_come_back_stays_json() -> None:
    whole = {**PLAIN, "fidelity": {"kld": NUMBERS.tolist(), "other_top": list(range(2 * SHORTEST)), "nll": [1.0]}}
    assert packed_row(whole) == whole and decode_row(encode_row(whole)) == whole
    assert (
        packed_row({**PLAIN, "fidelity": None})
        == {**PLAIN, "fidelity": None}
        == unpacked_row(whole | {"fidelity": None})
    )


@pytest.mark.parametrize("text", ["no base64", "AAAA", 5])
def test_a_damaged_list_is_named(text) -> None:
    with pytest.raises(ValueError, match="packed numbers are damaged"):
        unpacked_row({**PLAIN, "fidelity": {"kld": {"float32": text}}})
