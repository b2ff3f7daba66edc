"""Keys before RoPE, left at the attention modules that computed them, and models whose keys cannot be moved."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvbench.attention.rope import pre_rope
from kvbench.attention.rope.rotary import PROBED, alike, probed, rotary
from kvbench.errors import CacheError, ModelError
from kvbench.methods import load_method
from kvbench.models.projections import attentions
from kvbench.util.attachment import attached
from tests import zoo


def fresh() -> Any:
    """A model of its own: a method left on a shared one would take the keys."""
    return zoo.model.__wrapped__("llama")


def test_keys_are_taken_once_and_a_module_without_a_hook_has_none() -> None:
    model = fresh()
    layers = attentions(model)
    assert pre_rope.take(layers[0]) is None
    pre_rope.attach_pre_rope(model)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(5, 25)[None])
        taken = [pre_rope.take(layer) for layer in layers]
        assert all(keys is not None and keys.shape[2] == 20 for keys in taken)
        assert [pre_rope.take(layer) for layer in layers] == [None] * len(layers)
    finally:
        pre_rope.detach_pre_rope(model)
    assert pre_rope.take(layers[0]) is None


def test_hooks_are_installed_once() -> None:
    model = fresh()
    first = pre_rope.attach_pre_rope(model)
    hooks = list(attached(model).key_hooks)
    assert pre_rope.attach_pre_rope(model) == first == rotary(model).rotate
    assert attached(model).key_hooks == hooks
    assert all(len(layer.k_proj._forward_hooks) == 1 for layer in attentions(model))
    pre_rope.detach_pre_rope(model)
    assert attached(model).key_hooks == [] and not any(layer.k_proj._forward_hooks for layer in attentions(model))
    pre_rope.detach_pre_rope(fresh())  # nothing to remove


def test_keys_are_stored_before_rope_where_a_layer_asks_for_it_and_their_positions_noted() -> None:
    model = fresh()
    rotate, ids = rotary(model).rotate, torch.tensor([[5, 6, 7, 8, 30, 31]])
    before, _ = zoo.random_kv(6, channels=64)
    keys = rotate(before, ids)
    plain, layer = (zoo.new_layer(load_method("atom", rope="pre")) for _ in range(2))
    assert pre_rope.stored(plain, keys, before, model, ids) is keys and plain.progress.positions.runs == []
    layer.rope = rotate
    layer.update(keys, keys)
    assert pre_rope.stored(layer, keys, before, model, ids) is before
    assert layer.progress.positions.runs == [[(0, 5), (4, 30)]]
    # a layer that leads one with keys before RoPE notes positions for it, and stores its own keys after RoPE
    plain.follower = layer
    plain.update(keys, keys)
    assert pre_rope.stored(plain, keys, before, model, ids) is keys
    assert plain.progress.positions.runs == [[(0, 5), (4, 30)]]


def test_keys_that_were_not_captured_or_are_not_only_rotated_are_refused() -> None:
    model = fresh()
    rotate, ids = rotary(model).rotate, torch.arange(6)[None]
    before, _ = zoo.random_kv(6, channels=64)
    keys = rotate(before, ids)

    def stored(before: Any, ids: Any, earlier: int = 0) -> torch.Tensor:
        layer = zoo.new_layer(load_method("atom", rope="pre"))
        layer.rope = rotate
        if earlier:
            zoo.feed(layer, keys[:, :, :earlier], keys[:, :, :earlier])
        layer.update(keys, keys)
        return pre_rope.stored(layer, keys, before, model, ids)

    assert stored(before, ids) is before
    for odd in (None, ids[0]):
        with pytest.raises(ModelError, match="LlamaForCausalLM does not pass plain position ids"):
            stored(before, odd)
    for odd in (None, before[:, :, :5]):
        with pytest.raises(CacheError, match="LlamaForCausalLM: the keys before RoPE were not captured"):
            stored(odd, ids)
    for wrong in ((1.5 * before, ids), (before, ids + 1)):
        with pytest.raises(ModelError, match="rotating the keys before RoPE does not give the keys"):
            stored(*wrong)
    assert stored(before, ids + 6, earlier=3) is before  # only a layer's first tokens are compared
    keys[0, 0, -1, 0] = float("nan")
    assert stored(before, ids) is before  # what is not finite is found, with its place, when it is packed


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (None, "transformers.models.llama.modeling_llama does not define apply_rotary_pos_emb"),
        (lambda q, k, cos, sin: (q, 2 * k), "LlamaForCausalLM's rotary embedding is not a rotation"),
        (
            lambda q, k, cos, sin: (q, k[..., :8]),
            "LlamaForCausalLM's rotary embedding does not fit heads of 64 channels",
        ),
    ],
)
def test_rotations_that_cannot_be_used_are_refused_with_what_to_set(apply: Any, message: str, monkeypatch: Any) -> None:
    model = fresh()
    file = sys.modules["transformers.models.llama.modeling_llama"]
    if apply is None:
        monkeypatch.delattr(file, "apply_rotary_pos_emb")
    else:
        monkeypatch.setattr(file, "apply_rotary_pos_emb", apply)
    with pytest.raises(ModelError, match=rf"^position=cache: {message}\.\n  hint: method.position=original$"):
        rotary(model)
    with pytest.raises(ModelError, match=rf"^mine: {message}\.\n  hint: other$"):
        rotary(model, "mine", "other")
    monkeypatch.undo()
    assert rotary(model) is rotary(model)  # found once, and remembered


def test_turns_by_other_numbers_are_not_taken_from_the_last_one() -> None:
    turning, (keys, _) = rotary(fresh()), zoo.random_kv(4, channels=64)
    three = turning.turn(keys, 3)
    assert torch.equal(turning.turn(keys, [3]), three) and torch.equal(turning.turn(keys, 3), three)
    torch.testing.assert_close(turning.turn(turning.turn(keys, 4), -1), three, rtol=1e-4, atol=1e-4)
    assert turning.turn(keys.half(), 3).dtype == torch.float16


@pytest.mark.parametrize("training", [True, False])
def test_a_probe_gives_a_token_at_two_places_and_leaves_the_mode(training: bool) -> None:
    model = fresh().train(training)
    keys = probed(model, lambda layer: torch.tensor(layer))
    assert model.training is training and [int(before) for _, before in keys.values()] == [0, 1]
    assert all(found.shape == (2, 2, 1, 64) for found, _ in keys.values())
    apart, together = (rotary(model).turn(found[:1], by) for found, _ in [keys[1]] for by in (PROBED, 0))
    assert alike(apart, keys[1][0][1:]) and alike(together, keys[1][0][:1]) and not alike(together, keys[1][0][1:])


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float64, 1e-4)]
)
def test_keys_are_alike_up_to_rounding_of_the_largest(dtype: torch.dtype, share: float) -> None:
    expected = torch.tensor([-4.0, 1.0, 0.0]).to(dtype)
    for factor, same in ((0.9, True), (1.2, False)):
        nudged = expected.double() + torch.tensor([0.0, 0.0, -4 * factor * share])
        assert alike(nudged, expected) is same
    assert not alike(expected[None], expected) and not alike(expected[:2], expected)
