"""Refusals and what they refuse: both sides of each limit, and how far methods store everything exactly."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.byte_parts import Setting
from kvbench.methods.cocktail import Cocktail
from kvbench.methods.engine import Engine, rope_share
from kvbench.methods.kvarn import Kvarn
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.refusals import Reach, for_python
from kvbench.methods.scored import ScoredMethod
from kvbench.methods.streamingllm import TurningWithin
from kvbench.methods.turboquant import TurboQuant, TurboRotation
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec
from kvbench.retrieval import encoders

G128 = load_method("kvarn").quantizer


@pytest.mark.parametrize(
    ("method", "options", "key"),
    [
        (KVQuant, {"bits": 5}, "bits"),
        (KVQuant, {"bits": 1}, "bits"),
        (KVQuant, {"outliers": 0.51}, "outliers"),
        (KVQuant, {"outliers": -0.01}, "outliers"),
        (KVQuant, {"first_tokens": -1}, "first_tokens"),
        (KVQuant, {"cap_outliers": True, "outliers": 0.0}, "cap_outliers"),
        (Kvarn, {"balance": "rows", "quantizer": G128}, "balance"),
        (Kvarn, {"window": -1, "quantizer": G128}, "window"),
        (Kvarn, {"iterations": -1, "quantizer": G128}, "iterations"),
        (TurboQuant, {"format": "2bit"}, "format"),
        (TurboQuant, {"nc_at": "store"}, "nc_at"),
        (TurboQuant, {"boundary": -1}, "boundary"),
    ],
)
def test_values_beyond_a_limit_are_refused(method: Any, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        method(**{"takes": load_method(method.__name__.lower()).takes, **options}).check()
    assert raised.value.key == f"method.{key}"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("kvquant", {"bits": bits}) for bits in (2, 3, 4)),
        *(("kvquant", {"outliers": share}) for share in (0.0, 0.5)),
        ("kvquant", {"first_tokens": 0}),
        ("kvquant", {"cap_outliers": True, "outliers": 0.1}),
        *(("kvarn", {"balance": balance}) for balance in ("kvarn", "norm", "none")),
        ("kvarn", {"window": 0, "sinks": 0}),
        ("kvarn", {"iterations": 0}),
        *(("turboquant", {"nc_at": place, "boundary": 0}) for place in ("read", "write", "none")),
        *(("oscar", {"clip_key": 1.0, "window": 0, "basis": basis}) for basis in ("rotation", "calibrated")),
    ],
    ids=str,
)
def test_values_at_a_limit_are_taken(name: str, options: dict[str, Any]) -> None:
    load_method(name, **options).check(64)


@pytest.mark.parametrize(
    ("name", "options", "reach"),
    [
        ("kivi", {"window": 40, "sinks": 3, "residual": 64}, Reach("method.window", 40, 43)),
        ("kivi", {"sinks": 3, "residual": 64}, Reach("method.residual", 64, 66)),
        ("kivi", {"sinks": 3, "residual": 64, "evict": True}, Reach("method.residual", 64, 67)),
        ("oscar", {"window": 40, "sinks": 3}, Reach("method.window", 40, 43)),
        ("oscar", {"window": 0, "sinks": 3}, Reach("method.sinks", 3, 3)),
        ("oscar", {"window": 0, "sinks": 0}, None),
        ("kvquant", {"first_tokens": 5}, Reach("method.first_tokens", 5, 5)),
        ("kvquant", {"first_tokens": 0}, None),
        ("partial_logquant", {"window": 10, "sinks": 2, "value_window": "recent"}, Reach("method.window", 10, 12)),
        ("partial_logquant", {"reserved": 21, "value_window": "released"}, Reach("method.reserved", 21, 9)),
        ("logquant", {"reserved": 32, "sinks": 1}, Reach("method.reserved", 32, 30)),
        ("cocktail", {"chunk_size": 16}, Reach("method.chunk_size", 16, 15, of_prompt=True)),
    ],
    ids=str,
)
def test_the_reach_names_the_setting_that_decides_it(name: str, options: dict[str, Any], reach: Any) -> None:
    assert load_method(name, **options).reach() == reach


class Plain(ScoredMethod):
    """A scored method with three newest tokens."""

    newest = 3


def test_a_budget_reaches_as_far_as_its_tokens_or_the_newest_ones() -> None:
    assert Plain(budget=50).reach() == Reach("method.budget", 50, 50, of_prompt=True)
    assert Plain(budget=0.5).reach() == Reach("method.newest", 3, 3, of_prompt=True)
    method = Plain(budget=0.5)
    method.newest = 0
    assert method.reach() is None


def test_an_incomplete_tile_is_exact_beside_the_window() -> None:
    plain, windowed = load_method("kvarn", sinks=0), load_method("kvarn", sinks=0, window=20)
    assert [plain.exact(n) for n in (0, 127, 128, 130, 256)] == [0, 127, 0, 2, 0]
    assert [windowed.exact(n) for n in (0, 20, 21, 147, 148, 149)] == [0, 20, 21, 147, 20, 21]
    assert plain.gives_tail and not windowed.gives_tail
    assert plain.unit(64) == windowed.unit(512) == plain.tile == 128


def test_values_of_partial_logquant_are_grouped_per_token() -> None:
    formats = {side: {"bits": 4, "group_size": 32, "axis": "channel"} for side in ("key", "value")}
    with pytest.raises(ConfigError, match=r"quantizer\.value\.axis=channel: must be token"):
        load_method("partial_logquant", quantizer=formats)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(
    "change", [{"axis": "channel", "group_size": 32}, {"group_size": 64}, {"kind": "hierarchical", "bits": 8}], ids=str
)
def test_groups_of_oscar_are_whole_heads_of_one_token(side: str, change: dict[str, Any]) -> None:
    whole = {"bits": 2, "group_size": "head_dim", "axis": "token"}
    with pytest.raises(ConfigError) as raised:
        load_method("oscar", quantizer={"key": whole, "value": whole, side: {**whole, **change}})
    assert raised.value.key == f"quantizer.{side}"


def test_group_sizes_of_single_layers_are_fitted_and_named() -> None:
    method = load_method("kivi", quantizer="int4", layers="0:int8,1:fp16")
    assert method.fitted(80) == {"quantizer.value.group_size": 16, "method.layers.int8.value.group_size": 16}
    assert method.fitted(128) == {} and load_method("fp16").fitted(80) == {}


def test_rope_applies_to_the_share_of_a_head_that_the_model_says() -> None:
    assert rope_share({}) == rope_share({"rope_parameters": None}) == 1.0
    assert rope_share({"partial_rotary_factor": 0.25, "rotary_pct": 0.5}) == 0.25
    assert rope_share({"rotary_pct": 0.5}) == rope_share({"rope_parameters": {"partial_rotary_factor": 0.5}}) == 0.5
    method = Engine(format="octave_k3v3")
    method.prepare(SimpleNamespace(dimensions=lambda: {"rotary_pct": 0.5}))  # type: ignore[arg-type]
    assert method.turned(128) == 64 and Engine(rope_dim=0).turned(128) == 0
    key, value = method.layouts(128)
    assert (key.narrow, key.bits, value.bits) == (64, 4, 3)


def test_vllms_exact_layers_are_looked_up_before_a_run() -> None:
    method = TurboQuant()
    method.prepare(SimpleNamespace(dimensions=lambda: {"layer_types": ["linear_attention", "full_attention"]}))  # type: ignore[arg-type]
    assert method.hybrid
    method.prepare(SimpleNamespace(dimensions=lambda: {"layer_types": ["full_attention"]}))  # type: ignore[arg-type]
    assert not method.hybrid


def test_a_calibration_is_no_part_of_the_identity_before_it_is_known() -> None:
    assert KVQuant().identity() == {} and "calibration" not in load_method("oscar").identity()


def test_an_encoder_is_asked_whether_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def encoder(name: str) -> Any:
        return SimpleNamespace(ready=lambda: asked.append(name))

    monkeypatch.setattr(encoders, "encoder", encoder)
    Cocktail(encoder="bm25").ready()
    assert asked == ["bm25"]


NIBBLES = FormatSpec(bits=8, group_size=64, axis="token", kind="hierarchical")


def test_hints_for_python_are_arguments() -> None:
    error = ConfigError("method.window", 3, "is odd", hint="method.window=4, or quantizer.bits=2")
    assert for_python(error, None).hint == "window=4, or bits=2"
    spec = QuantizerSpec(name="mine", key=NIBBLES, value=replace(NIBBLES, kind="affine", bits=4))
    for size, wanted in (("32", 32), ("head_dim", "head_dim")):
        hint = f"quantizer.value.group_size={size}"
        error = ConfigError("quantizer.value.group_size", 64, "does not divide", allowed=["32"], hint=hint)
        turned = for_python(error, spec)
        key = {"bits": 8, "group_size": 64, "axis": "token", "kind": "hierarchical"}
        value = {"bits": 4, "group_size": wanted, "axis": "token"}
        assert turned.hint == f"{hint}; in Python, pass quantizer={ {'key': key, 'value': value} }"
        assert (turned.key, turned.value, turned.problem) == (error.key, 64, error.problem)
        assert list(turned.allowed) == list(error.allowed)
        assert "quantizer=" not in for_python(error, None).hint


def test_stored_keys_are_turned_in_the_models_basis() -> None:
    """Back to the model's basis, there by so many positions, and into the stored basis again."""
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0])
    basis = SimpleNamespace(keys=lambda x: x * sign, back=lambda x: x * sign)
    keys = torch.randn(1, 2, 3, 4).half()
    seen: list[Any] = []

    def turn(x: torch.Tensor, by: Any) -> torch.Tensor:
        seen.append((x.dtype, by))
        return x.flip(-1)

    turned = TurningWithin(basis, turn)(keys, [1, 2])  # type: ignore[arg-type]
    assert torch.equal(turned, ((keys.float() * sign).flip(-1) * sign).half())
    assert turned.dtype == torch.float16 and seen == [(torch.float32, [1, 2])]


@pytest.mark.parametrize("name", ["kivi", "atom", "oscar", "kvarn", "quantspec", "keep"])
def test_a_rule_that_cannot_be_is_refused_whatever_else_a_method_checks(name: str, monkeypatch: Any) -> None:
    method = load_method(name)
    method.check(128)
    monkeypatch.setattr(type(method), "exact", lambda self, n: n + 1)
    with pytest.raises(ConfigError, match=r"exact\(0\) returned 1"):
        method.check(128)


@pytest.mark.parametrize(
    ("boundary", "layers", "packed", "stored_as"),
    [
        (2, 8, [2, 3, 4, 5], [0, 0, 2, 2, 2, 2, 0, 0]),
        (0, 3, [0, 1, 2], [0, 0, 0]),
        (2, 3, [1], [0, 1, 0]),
        (1, 2, [], [0, 0]),
        (5, 5, [2], [0, 0, 2, 0, 0]),
    ],
)
def test_layers_at_either_end_stay_in_full_precision(boundary, layers, packed, stored_as) -> None:
    method = TurboQuant(boundary=boundary)
    assert [layer for layer in range(layers) if method.packs_in(layer, layers)] == packed
    assert [method.stored_as(layer, layers) for layer in range(layers)] == stored_as
    assert method.packs_in(0, None) and method.boundaries(None) == 0


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"format": "k8v4"}, (64, 0), (32, 4)),
        ({"format": "4bit_nc"}, (32, 2), (32, 4)),
        ({"format": "k3v4_nc"}, (24, 2), (32, 4)),
        ({"format": "3bit_nc"}, (24, 2), (24, 4)),
        ({"format": "3bit_nc", "qjl": True, "nc_at": "none"}, (24, 4), (24, 4)),
    ],
    ids=str,
)
def test_codes_and_numbers_of_a_token_are_vllms(options, key, value) -> None:
    """In a head of 64 channels; seven tokens of three heads have 21 times as many."""
    method, at = TurboQuant(**options), Setting(7, 7, 6, 3, 64)
    for form, (codes, scales) in zip(method.formats(), (key, value), strict=True):
        found = method.packed_bytes(at, 7, form)
        assert (found.codes, found.scales, found.window) == (21 * codes, 21 * scales, 0)
    kinds = [type(method.make_quantizer(side, 64)).__name__ for side in ("key", "value")]
    wanted = "Fp8" if options["format"] == "k8v4" else "SketchQuantizer" if "qjl" in options else "LevelQuantizer"
    assert kinds == [wanted, "TruncatingQuantizer"]
    assert method.rotation_of_keys() == ("none" if options["format"] == "k8v4" else "hadamard")


def test_options_of_turboquant_reach_its_quantizers() -> None:
    assert TurboQuant(nc_at="write").make_quantizer("key", 64).correction == "write"
    assert TurboQuant(qjl=True, nc_at="none", seed=5).make_quantizer("key", 64).seed == 5
    assert TurboQuant(rotation=TurboRotation(key="random")).rotation_of_keys() == "random"


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_of_kvarns_tiles_count_rows_twice_and_columns_once(axis, bits) -> None:
    """Two tiles of 128 tokens in each of three heads of 64 channels."""
    method, at = load_method("kvarn"), Setting(300, 300, 6, 3, 64, width=4)
    form = FormatSpec(bits=bits, group_size=128 if axis == "channel" else "head_dim", axis=axis)
    found = method.packed_bytes(at, 256, form)
    numbers = 2 * 64 + 128 if axis == "channel" else 2 * 128 + 64
    assert (found.codes, found.scales, found.window) == (6 * 128 * 64 * bits // 8, 6 * numbers * 2, 0)


@pytest.mark.parametrize(("scales", "width", "param"), [("fp16", 2, 2), ("fp16", 4, 4), ("bf16", 4, 2), ("fp32", 2, 4)])
def test_bytes_of_oscar_are_codes_and_two_numbers_a_token(scales, width, param) -> None:
    method, at = load_method("oscar", scales=scales), Setting(300, 300, 6, 3, 64, width=width)
    found = method.packed_bytes(at, 7, method.formats()[0])
    assert (found.codes, found.scales, found.window) == (21 * 64 * 2 // 8, 21 * 2 * param, 0)
