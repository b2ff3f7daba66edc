"""The error of each layer's attention while given tokens are decoded, to find where a cache's error arises.

Three passes decode the same tokens one at a time. The first has the full-precision cache, and records the input and the
output of each layer's attention. The second has the candidate's cache: its outputs contain the errors of all layers
before. In the third, each layer's attention gets the recorded input instead of its own, so that a layer's error is only
that of its own keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.fidelity import Before, follow
from kvbench.models.projections import attentions


@dataclass
class _Tape:
    """Inputs and outputs of each layer's attention in the order of the passes, ``[B, q, d]`` each."""

    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of each layer's attention output, ``|candidate - fp16| / |fp16|`` over all decoded tokens.

    Args:
        own: errors if each layer gets the input that it had with the fp16 cache: what arises in the layer itself.
        total: errors as decoded, which include those of the layers before.
    """

    own: list[float]
    total: list[float]


def layer_errors(
    model: PreTrainedModel,
    base: Callable[[], KVCache],
    candidate: Callable[[], KVCache],
    input_ids: Tensor,
    tokens: Tensor,
    before: Before | None = None,
) -> LayerErrors:
    """Measure the error of each layer's attention for one prompt and the tokens after it.

    Args:
        base: function that sets the model up for a full-precision cache, and returns the empty cache.
        candidate: the same for the cache to examine.
        input_ids: the prompt, ``[1, T]``.
        tokens: the tokens after it, ``[1, n]``.
        before: called before each step of the candidate, for tests that change the cache.

    Raises:
        ModelError: the model's attention modules cannot be found.
    """
    exact, passes = _Tape(), []
    with _taped(model, exact):
        follow(model, base(), input_ids, None, tokens, prefill_rows=None)
    for given in (None, exact.inputs):
        tape = _Tape()
        with _taped(model, tape, given):
            follow(model, candidate(), input_ids, None, tokens, prefill_rows=None, before=before)
        passes.append([_decode_error(*pair) for pair in zip(tape.outputs, exact.outputs, strict=True)])
    return LayerErrors(own=passes[1], total=passes[0])


def _decode_error(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the relative error over all passes but the first, which is the prefill."""
    candidate, base = (torch.cat(list(parts[1:]), 1).double() for parts in (outputs, exact))
    return float((candidate - base).norm() / base.norm().clamp(min=1e-300))


@contextmanager
def _taped(model: PreTrainedModel, tape: _Tape, given: Sequence[Sequence[Tensor]] | None = None) -> Iterator[None]:
    """Record each layer's attention inside a ``with`` block; inputs in `given` replace those of the layers."""
    hooks: list[Any] = []
    for index, module in enumerate(attentions(model)):
        tape.inputs.append([])
        tape.outputs.append([])

        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> Any:
            named = "hidden_states" in kwargs
            state = kwargs["hidden_states"] if named else args[0]
            if given is not None:
                # the recorded input of the same pass: so many inputs have been taped for this layer so far
                state = given[index][len(tape.inputs[index])].to(state.device)
            tape.inputs[index].append(state)
            if given is None:
                return None
            return (args, {**kwargs, "hidden_states": state}) if named else ((state, *args[1:]), kwargs)

        def leave(_: Any, args: Any, output: Any, index: int = index) -> None:
            tape.outputs[index].append(output[0] if isinstance(output, tuple) else output)

        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
