"""Attention of a decode step that is recorded once and replayed: all that changes stands in device memory.

While a step is recorded the model runs under its own attention implementation, whose mask is none (kernels know what
they may see from the table of phases) and whose cache hands keys and values through. Each layer's call appends the new
tokens at places that stand on the device and runs the kernel that serves the layer, on buffers and tables that stay
where they are. For ``torch.compile`` the call is one opaque operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvbench.attention.logits import PLAIN, SINKS, SOFTCAP, Logits, logits_of
from kvbench.attention.phases import NotServed
from kvbench.attention.register import UNSERVED

NAME = "kvbench_recorded"

#: attention of the layers of the step under way: (query, keys, values, scaling, logits) -> ``[B, q, Hq, Dv]``
Serve = Callable[[Tensor, Tensor, Tensor, float, Logits], Tensor]
#: transformers and torch.compile hand a step nothing but tensors, so the serving function is found by the running
#: context: recordings of other threads have their own
_serving: ContextVar[Serve] = ContextVar("kvbench_recorded_step")


class PassThrough(Cache):
    """Stands in for the cache while a step is recorded: keys and values go straight to attention."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they came."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: positions are given, so no step depends on it."""
        return 0

    def __len__(self) -> int:
        return 1  # models test a cache by its truth


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve transformers' attention interface while a step is recorded.

    Raises:
        NotServed: the model asks for something that a recorded step does not have.
    """
    for name in (*UNSERVED, "sliding_window"):
        if kwargs.get(name) is not None:
            raise NotServed(f"the model's attention uses '{name}'")
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if torch.compiler.is_compiling():
        more = kwargs.get(SOFTCAP), kwargs.get(SINKS)
        return torch.ops.kvbench.recorded_attention(query, key, value, factor, *more), None
    return serve(query, key, value, factor, logits_of(module, query, kwargs)), None


def serve(query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits = PLAIN) -> Tensor:
    """Attend in the next layer of the step under way."""
    return _serving.get()(query, key, value, scaling, logits)


@library.custom_op("kvbench::recorded_attention", mutates_args=())
def recorded_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Run :func:`serve` as one operation that a compiler does not look into."""
    return serve(query, key, value, scaling, Logits(softcap, None if sinks is None else sinks.reshape(-1)))


@recorded_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@contextmanager
def recording(model: Any, serving: Serve) -> Iterator[None]:
    """Run `model` with recorded attention, which `serving` serves layer by layer, in their order."""
    # Not registered as a mask interface: transformers then makes no mask at all.
    AttentionInterface.register(NAME, attention)
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    token = _serving.set(serving)
    try:
        yield
    finally:
        _serving.reset(token)
        model.set_attn_implementation(before)
