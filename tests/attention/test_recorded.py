"""Attention of a step that is recorded: what it asks for, what it refuses, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.attention import recorded
from kvbench.attention.logits import Logits
from kvbench.attention.phases import NotServed
from kvbench.attention.rope import rotary as pre_rope
from kvbench.attention.rope.rotary import rotary
from tests import zoo

QUERY, KEY, VALUE = torch.randn(2, 4, 3, 64), torch.randn(2, 2, 3, 64), torch.randn(2, 2, 3, 5)
SINKS = torch.tensor([4.0, -1.0, 2.0, 0.5])


def serving(seen: list[tuple[float, Logits]]) -> Any:
    """A function that notes what it is asked for."""

    def serve(query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits) -> Tensor:
        assert (query.shape, key.shape, value.shape) == (QUERY.shape, KEY.shape, VALUE.shape)
        seen.append((scaling, logits))
        return torch.full((2, 3, 4, 5), scaling)

    return serve


def test_every_way_to_a_recorded_step_ends_in_its_own_function() -> None:
    model, module, seen = zoo.model.__wrapped__("llama"), torch.nn.Linear(1, 1), []
    operation = torch.ops.kvbench.recorded_attention
    with recorded.recording(model, serving(seen)):
        assert model.config._attn_implementation == recorded.NAME
        out, weights = recorded.attention_while_recording(module, QUERY, KEY, VALUE, None)
        assert weights is None and float(out[0, 0, 0, 0]) == 0.125
        recorded.attention_while_recording(
            module, QUERY, KEY, VALUE, None, 0.5, softcap=3.0, s_aux=SINKS, sliding_window=None
        )
        assert torch.equal(operation(QUERY, KEY, VALUE, 0.25, None, None), torch.full((2, 3, 4, 5), 0.25))
        operation(QUERY, KEY, VALUE, 0.75, 2.0, SINKS.view(1, 4, 1, 1))
    assert model.config._attn_implementation == "sdpa"
    assert [scaling for scaling, _ in seen] == [0.125, 0.5, 0.25, 0.75]
    assert [logits.softcap for _, logits in seen] == [None, 3.0, None, 2.0]
    assert seen[0][1].plain and seen[2][1].plain
    assert all(torch.equal(seen[i][1].sinks, SINKS) for i in (1, 3))
    with pytest.raises(LookupError):
        recorded.serve(QUERY, KEY, VALUE, 0.1)


def test_a_recording_that_fails_leaves_the_model_as_it_was() -> None:
    model, seen = zoo.model.__wrapped__("llama"), []
    with pytest.raises(ValueError, match="within"), recorded.recording(model, serving(seen)):
        with recorded.recording(model, serving([])):
            pass
        recorded.serve(QUERY, KEY, VALUE, 0.1)  # the outer one is in force again
        raise ValueError("within")
    assert len(seen) == 1 and model.config._attn_implementation == "sdpa"
    with pytest.raises(LookupError):
        recorded.serve(QUERY, KEY, VALUE, 0.1)


def test_the_compiler_is_told_the_shape_of_the_output() -> None:
    meta = [x.to("meta") for x in (QUERY, KEY, VALUE)]
    out = torch.ops.kvbench.recorded_attention(*meta, 0.1, None, None)
    assert out.shape == (2, 3, 4, 5) and out.dtype == QUERY.dtype and out.device.type == "meta"


def test_what_a_recorded_step_cannot_serve_is_named() -> None:
    model, seen = zoo.model.__wrapped__("llama"), []
    with recorded.recording(model, serving(seen)), pytest.raises(NotServed, match="'position_bias'"):
        recorded.attention_while_recording(torch.nn.Linear(1, 1), QUERY, KEY, VALUE, None, 0.1, position_bias=16)
    assert not seen


@pytest.mark.parametrize(("window", "cached"), [(16, 16), (None, None), (16, None), (None, 16), (16, 17)])
def test_a_sliding_window_must_be_that_of_the_layer_s_cache(window: int | None, cached: int | None) -> None:
    model, module, seen = zoo.model.__wrapped__("llama"), torch.nn.Linear(1, 1), []
    module.layer_idx = 1  # type: ignore[assignment]
    with recorded.recording(model, serving(seen), windows=[None, cached]):
        if window == cached:
            recorded.attention_while_recording(module, QUERY, KEY, VALUE, None, 0.1, sliding_window=window)
        else:
            with pytest.raises(NotServed, match=f"'sliding_window' {window} .* the layer has {cached}"):
                recorded.attention_while_recording(module, QUERY, KEY, VALUE, None, 0.1, sliding_window=window)
    assert len(seen) == (window == cached)


def test_the_stand_in_for_a_cache_passes_keys_and_values_on() -> None:
    through = recorded.PassThrough()
    keys, values = through.update(KEY, VALUE, 0)
    assert keys is KEY and values is VALUE
    assert through.get_seq_length() == 0 and bool(through) and not through.is_compileable


@torch.inference_mode()
def test_each_layer_gets_the_keys_that_it_stores() -> None:
    """Before RoPE in the first layer, after it in the second, as with a map of formats."""
    model, seen = zoo.model.__wrapped__("llama"), []
    pre_rope.attach_pre_rope(model)
    ids, positions = torch.tensor([[5, 6]]), torch.tensor([[40, 41]])

    def serve(query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits) -> Tensor:
        seen.append(key)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)

    stored = []
    for before_rope in ([True, False], [True, True]):
        with recorded.recording(model, serve, before_rope=before_rope):
            model(input_ids=ids, position_ids=positions, past_key_values=recorded.PassThrough(), use_cache=True)
        stored.append(seen[-2:])
    rotate = rotary(model, "keys").rotate
    assert torch.equal(stored[0][0], stored[1][0])
    assert torch.allclose(stored[0][1], rotate(stored[1][1], positions), atol=1e-5)
    assert not torch.allclose(stored[0][1], stored[1][1], atol=1e-2)
