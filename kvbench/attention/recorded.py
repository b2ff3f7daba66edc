"""Attention of a decode step that is recorded as a CUDA graph: everything that changes is in device memory.

While a step is recorded, the model uses a separate attention implementation. This gets no mask (the table of phases
tells kernels which tokens are visible), and a stand-in for the cache passes it the new keys and values unchanged. In
each layer, it appends the new tokens at positions that kernels read from device memory, and attends by a kernel over
buffers and tables whose addresses do not change. ``torch.compile`` sees the call as one opaque operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvbench.attention.logits import PLAIN, SINKS, SOFTCAP, Logits, logits_of
from kvbench.attention.phases import NotServed
from kvbench.attention.rope.rotary import HOOKED
from kvbench.attention.served import UNSERVED
from kvbench.util.attachment import attached

NAME = "kvbench_recorded"
#: the same for caches that hold keys before RoPE
BEFORE_ROPE = "kvbench_recorded_before_rope"

#: attention of the next layer of the current step: (query, keys, values, scaling, logits) -> ``[B, q, Hq, Dv]``
Serve = Callable[[Tensor, Tensor, Tensor, float, Logits], Tensor]
#: the serving function of the current step. Transformers and torch.compile pass only tensors to attention, hence a
#: context variable; recordings in other threads have their own value
_serving: ContextVar[Serve] = ContextVar("kvbench_recorded_step")
#: sliding window of each layer that the current step serves
_windows: ContextVar[Sequence[int | None]] = ContextVar("kvbench_recorded_windows", default=())


class PassThrough(Cache):
    """Placeholder for the cache while a step is recorded as a CUDA graph; it stores nothing."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: a recorded step passes its positions explicitly, so nothing depends on the length."""
        return 0

    def __len__(self) -> int:
        return 1  # some models test the cache for truth


def attention_while_recording(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention while a step is recorded as a CUDA graph; models call it through transformers' interface.

    Args:
        attention_mask: ignored; a recorded step reads from device memory which tokens are visible.

    Raises:
        NotServed: the model passes an argument that a recorded step does not support, or another sliding window than
            that of the layer's cache.
    """
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise NotServed(f"the model passes '{name}' to attention, which a recorded step does not support")
    if not torch.compiler.is_compiling():  # every pass has first run without compilation
        check_model_window(module, kwargs.get("sliding_window"))
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if torch.compiler.is_compiling():
        more = kwargs.get(SOFTCAP), kwargs.get(SINKS)
        return torch.ops.kvbench.recorded_attention(query, key, value, factor, *more), None
    return serve(query, key, value, factor, logits_of(module, query, kwargs)), None


def check_model_window(module: torch.nn.Module, window: int | None) -> None:
    """Raise NotServed if a model limits a layer's attention to another sliding window than the layer's cache."""
    windows, index = _windows.get(), getattr(module, "layer_idx", None)
    served = windows[index] if index is not None and index < len(windows) else None
    if window != served:
        raise NotServed(
            f"the model passes 'sliding_window' {window} to attention, but the cache of the layer has {served}"
        )


def attention_before_rope(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Do what :func:`attention_while_recording` does, but pass on the keys before RoPE, for a cache that stores these.

    Args:
        module: the model's attention module, on which a hook has stored the keys before RoPE.
        key: keys of the new tokens after RoPE, which are used only if the layer stores keys after RoPE.

    Raises:
        NotServed: the keys before RoPE were not captured.
    """
    hooked = getattr(module, HOOKED, None)
    before = None if hooked is None else hooked.keys
    if hooked is None or before is None:
        raise NotServed("the keys before RoPE were not captured")
    hooked.keys = None
    return attention_while_recording(module, query, before if hooked.stored else key, value, *args, **kwargs)


def serve(query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits = PLAIN) -> Tensor:
    """Call the function given to :func:`recording`, which stores a layer's new tokens and computes its attention."""
    return _serving.get()(query, key, value, scaling, logits)


@library.custom_op("kvbench::recorded_attention", mutates_args=())
def recorded_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Call :func:`serve` as a custom torch operation, which ``torch.compile`` treats as opaque."""
    return serve(query, key, value, scaling, Logits(softcap, None if sinks is None else sinks.reshape(-1)))


@recorded_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@contextmanager
def recording(
    model: Any, serving: Serve, *, before_rope: Sequence[bool] = (), windows: Sequence[int | None] = ()
) -> Iterator[None]:
    """Make a model call `serving` for its attention inside the context, while a step is recorded as a CUDA graph.

    Args:
        model: model that already runs kvbench's attention.
        serving: function that stores the new tokens of one layer and computes its attention (:data:`Serve`). It is
            called once per layer in each step, and must infer the layer from the order of the calls.
        before_rope: for each layer, True to pass it keys before RoPE; empty: no layer stores those.
        windows: for each layer, the sliding window that `serving` takes into account, None without one; empty: no layer
            has one.
    """
    # No mask function is registered under this name, so transformers makes no mask at all.
    AttentionInterface.register(NAME, attention_while_recording)
    AttentionInterface.register(BEFORE_ROPE, attention_before_rope)
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    model.set_attn_implementation(BEFORE_ROPE if any(before_rope) else NAME)
    known = attached(model)
    for hooked, stored in zip(known.key_hooks if known is not None else (), before_rope, strict=False):
        hooked.stored = stored
    tokens = _serving.set(serving), _windows.set(windows)
    try:
        yield
    finally:
        _serving.reset(tokens[0])
        _windows.reset(tokens[1])
        model.set_attn_implementation(before)
