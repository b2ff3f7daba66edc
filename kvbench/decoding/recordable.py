"""Checks that a forward pass over the cache of a method can be recorded as a CUDA graph."""

from __future__ import annotations

import sys

from kvbench.attention import fused, phases
from kvbench.attention.phases import NotServed
from kvbench.cache import KVCache
from kvbench.cache.kernels import at_once
from kvbench.cache.layer import KVLayer

#: why passes of hybrid models are not captured
STATES = "layers with a state of fixed size (linear attention, Mamba or convolution)"


def check(cache: KVCache, count: int, *, upper: bool, observed: bool) -> None:
    """Raise NotServed if a layer of a cache cannot be served by a recorded pass of `count` new tokens per row.

    Only problems that can be found without running the model are reported here. For `upper` and `observed` see
    :class:`kvbench.decoding.recorded.Recorded`.
    """
    if cache.state_layers:
        raise NotServed(STATES)
    if cache.method.observe_steps and not observed:
        name = type(cache.method).__name__.lower()
        raise NotServed(f"{name} needs attention weights to be added after every step, but drafts may be rejected")
    for layer in cache.kv_layers:
        if layer.method.eager:
            check_eager(layer, count)
        fused.check(layer, None, count, expected(layer) + count)
        for store, channels in zip(layer.stores(), (layer.key_dim, layer.value_dim), strict=True):
            for segment in store.segments:
                phases.part(segment, channels, upper)


def check_eager(layer: KVLayer, count: int) -> None:
    """Raise NotServed unless a kernel can pack the new tokens of a pass before they attend."""
    if all(len(store.segments) == 1 for store in layer.stores()):
        return  # the layer packs no tokens
    packed = layer.packed_at_once()
    reason = "the tokens of a step are packed before they attend"
    if packed is None or count > 1:
        raise NotServed(reason)
    refusal = at_once.refuses(packed)
    if refusal:
        raise NotServed(f"{reason}, and {refusal}")
    if layer.window is not None:
        raise NotServed(f"{reason}, and a sliding window hides some")
    sinks = getattr(layer.method, "sinks", 0)
    if any(sum(store.signature(row)[:-2]) < sinks for store in layer.stores() for row in range(layer.batch)):
        raise NotServed(f"{reason}, and there are fewer than {sinks} yet")


def expected(layer: KVLayer) -> int:
    """Return the number of tokens up to which the steps of a captured pass must be served: any, if it is unknown."""
    return layer.progress.max_length or sys.maxsize
