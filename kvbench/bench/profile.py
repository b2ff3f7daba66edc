"""Time profile of a decode step as a CUDA graph: milliseconds by kind of kernel, and the GPU's idle time in between."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.cache import Prompts
from kvbench.decoding.autoregressive import capture
from kvbench.decoding.sampling import Sampling
from kvbench.measure.random_fill import fill_at_random
from kvbench.methods.base import Method

#: kinds of kernels, and patterns of kernel names; the first that matches counts
KINDS = (
    ("attention", r"^decode$|^decode_|merge"),
    ("pack", r"pack_tiles|pack_layers|pack_windows"),
    ("append", r"^write$|^write_"),
    ("linear", r"^product$|^matvec_product$|gemm|gemv|nvjet|cutlass|splitK|cublas|int4|triton_.*_mm_"),
    ("copies", r"^Mem(cpy|set)|direct_copy"),
)
#: number of profiled steps
STEPS = 16


@torch.inference_mode()
def profile_step(
    model: PreTrainedModel,
    method: Method,
    context: int,
    batch: int,
    *,
    prompts: Prompts | None = None,
    compile: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Profile decode steps that run as a CUDA graph, and return how long each kind of kernel takes per step.

    The cache is first filled with random keys and values of `context` tokens.

    `prompts` are for methods that can create a cache only for known prompts
    (:meth:`kvbench.measure.meter.Meter.batch`).

    Returns:
        All times are milliseconds per step. ``step_ms``: elapsed time, under the profiler. ``busy_ms``: sum over all
        kernels. ``ms``: sum for each kind of kernel (:func:`kernel_kind`). ``kernels``: name, time and number of calls
        of the twelve kernels that take longest.

    Raises:
        NotCaptured: the step cannot be captured as a CUDA graph.
    """
    device = model.get_input_embeddings().weight.device
    cache = method.new_cache(model, prompts, max_length=context + 2 * STEPS + 8)
    fill_at_random(model, cache, batch, context, seed)
    token = torch.full((batch,), 3, device=device)
    lengths = torch.full((batch,), context, device=device)
    captured = capture(model, cache, token, lengths, Sampling(), [], 2 * STEPS + 4, compile)
    captured.replay()
    for _ in range(STEPS):
        captured.next()
        captured.replay()
    torch.cuda.synchronize(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        begin.record()
        for _ in range(STEPS):
            captured.next()
            captured.replay()
        end.record()
        torch.cuda.synchronize(device)
    times: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time / 1e3 / STEPS)
    return {"step_ms": begin.elapsed_time(end) / STEPS, **summed_kernels(times)}


def summed_kernels(times: dict[str, list[float]]) -> dict[str, Any]:
    """Sum up the times of kernels: over all, by kind, and for each of the kernels that take longest.

    `times` are, by kernel, the milliseconds of each of its calls, divided by the number of steps.
    """
    by_kind: dict[str, float] = {}
    for name, seconds in times.items():
        by_kind[kernel_kind(name)] = by_kind.get(kernel_kind(name), 0.0) + sum(seconds)
    longest = sorted(times, key=lambda name: -sum(times[name]))[:12]
    return {
        "busy_ms": round(sum(by_kind.values()), 4),
        "ms": {name: round(value, 4) for name, value in sorted(by_kind.items(), key=lambda item: -item[1])},
        "kernels": [
            {"name": name[:120], "ms": round(sum(times[name]), 4), "calls": round(len(times[name]) / STEPS, 2)}
            for name in longest
        ],
    }


def kernel_kind(name: str) -> str:
    """Return the kind of a CUDA kernel (:data:`KINDS`), or ``elementwise`` (norms, activations, RoPE, ...)."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "elementwise")
