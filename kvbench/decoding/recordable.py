"""Checks whether decode steps can be captured as CUDA graphs: the option, the device, the model and the cache."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvbench.attention import fused, phases
from kvbench.attention.phases import NotServed
from kvbench.cache import KVCache
from kvbench.cache.layer import KVLayer
from kvbench.methods.speculation import Speculation
from kvbench.util.attachment import placement

Graphs = Literal["auto", "always", "never"]

#: smallest number of steps for which a capture, which takes about a second, is worth its time
WORTH = 64
#: why passes of hybrid models are not captured
STATES = "layers with a state of fixed size (linear attention, Mamba or convolution)"


class NotCaptured(Exception):
    """Error raised if a decode step cannot be captured as a CUDA graph; results show its message as the reason."""


def eager_reason(
    model: PreTrainedModel,
    cache: KVCache,
    graphs: Graphs,
    steps: int,
    device: torch.device,
    speculation: Speculation | None = None,
) -> str | None:
    """Return why decode steps should not be captured as CUDA graphs; None if capturing should be tried.

    With ``graphs=auto`` there must be at least :data:`WORTH` steps.
    """
    if graphs == "never":
        return "runtime.graphs=never"
    if device.type != "cuda":
        return f"no CUDA graphs on {device.type}"
    if steps < (WORTH if graphs == "auto" else 1):
        return f"{steps} steps: too few for a capture" if steps > 0 else "no steps"
    if cache.state_layers:
        return STATES
    if cache.follower is not None and speculation is None:
        return "the cache shares its prompt with another one"
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 and not devices <= set(placement(model).devices):
        return "layers on several devices, but not placed there by runtime.device_map"
    if placement(model).team is not None and graphs != "always":
        return "tensor parallelism, whose collectives are not recorded unless runtime.graphs=always"
    return None


def check_recordable(cache: KVCache, count: int, *, upper: bool, observed: bool) -> None:
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
        fused.check_plain_causal(layer, None, count, expected(layer) + count)
        for store, channels in zip(layer.stores(), (layer.key_dim, layer.value_dim), strict=True):
            for segment in store.segments:
                phases.describe_part(segment, channels, upper)


def check_eager(layer: KVLayer, count: int) -> None:
    """Raise NotServed unless a kernel can pack the new tokens of a pass before they attend."""
    from kvbench.cache.kernels import at_once  # imports all quantizers of such kernels

    if all(len(store.segments) == 1 for store in layer.stores()):
        return  # the layer packs no tokens
    packed = layer.packed_at_once()
    reason = "the tokens of a step are packed before they attend"
    if packed is None or count > 1:
        raise NotServed(reason)
    refusal = at_once.packing_refusal(packed)
    if refusal:
        raise NotServed(f"{reason}, and {refusal}")
    if layer.window is not None:
        raise NotServed(f"{reason}, and a sliding window hides some")
    sinks = getattr(layer.method, "sinks", 0)
    if any(sum(store.signature(row)[:-2]) < sinks for store in layer.stores() for row in range(layer.batch)):
        raise NotServed(f"{reason}, and there are fewer than {sinks} yet")


def expected(layer: KVLayer) -> int:
    """Return the largest number of tokens per row that captured steps must handle; ``sys.maxsize`` if unknown."""
    return layer.progress.max_length or sys.maxsize
