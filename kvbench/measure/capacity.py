"""Capacity: how many sequences of one length a memory holds, by formula and by allocating their caches.

The formula is ``floor((memory - weights - workspace) / bytes of a sequence)``. The workspace is the memory that storing
a prompt needs for a moment in addition to the cache: one layer's new keys and values and what packing them takes. It
does not include a prefill's activations, which depend on the chunk in which a prompt is read.
"""

from __future__ import annotations

from typing import Any

import torch

from kvbench.measure.meter import Meter
from kvbench.measure.point_figures import weight_bytes
from kvbench.measure.random_fill import fill_randomly
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.util.failures import bytes_asked, is_out_of_memory

Figures = dict[str, Any]


def by_formula(memory: int, weights: int, workspace: int, per_sequence: int) -> int:
    """Return how many sequences fit into memory; 0 if not even the weights and the workspace do. All in bytes."""
    return max(0, memory - weights - workspace) // per_sequence


def measure_capacity(meter: Meter, prompt: int, memory: int, most: int) -> Figures:
    """Allocate and fill caches of single sequences until memory runs out, and compare their number with the formula.

    Args:
        meter: model, method and settings; ``how.new_tokens`` tokens fit into each cache after the prompt.
        prompt: number of prompt tokens of each sequence, which are random keys and values.
        memory: bytes that the process may use.
        most: largest number of sequences to allocate.

    Returns:
        ``by_formula`` and ``allocated``: numbers of sequences, the second at most `most`. ``ended``: ``memory`` or
        ``bound``, whatever came first. ``memory``, ``weights``, ``workspace`` and ``per_sequence``: the formula's terms
        in bytes. ``status`` is ``ok``, or ``oom`` if a single sequence does not fit, which leaves the formula without
        its last two terms.
    """
    weights = weight_bytes(meter.model)
    figures: Figures = {"prompt": prompt, "new_tokens": meter.how.new_tokens, "memory": memory, "weights": weights}
    release(meter.device)
    try:
        workspace, per_sequence = _terms(meter, prompt)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", **figures, "allocated": 0, "bytes_asked": bytes_asked(error)}
    finally:
        release(meter.device)
    figures |= {"workspace": workspace, "per_sequence": per_sequence}
    figures["by_formula"] = by_formula(memory, weights, workspace, per_sequence)
    figures["allocated"] = _allocated(meter, prompt, most)
    release(meter.device)
    return {"status": "ok", **figures, "ended": "bound" if figures["allocated"] == most else "memory"}


def _terms(meter: Meter, prompt: int) -> tuple[int, int]:
    """Store one sequence; return the bytes that this needs for a moment, and those of the cache's buffers."""
    peaks = PhasePeaks(meter.device, census=True)
    with peaks.run():
        peaks.phase("prefill")
        before = _in_use(meter.device)
        cache = _stored(meter, prompt)
        reserved = cache.bill().reserved.total
        peaks.phase("end")
    peak = peaks.row()["prefill"]
    others = weight_bytes(meter.model) if before is None else before
    return max(0, peak - others - reserved), reserved


def _in_use(device: torch.device) -> int | None:
    """Return the bytes that torch has allocated on a GPU; None on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _allocated(meter: Meter, prompt: int, most: int) -> int:
    """Store sequences until memory runs out or there are `most` of them; return how many were stored."""
    caches: list[Any] = []
    while len(caches) < most:
        try:
            caches.append(_stored(meter, prompt))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
    return len(caches)


@torch.inference_mode()
def _stored(meter: Meter, prompt: int) -> Any:
    """Return a new cache with one sequence of random keys and values, and room for the tokens to come."""
    prompts = meter.batch(prompt, 1)[1]
    cache = meter.method.new_cache(meter.model, prompts, max_length=prompt + meter.how.new_tokens)
    cache.options = meter.how.options
    fill_randomly(meter.model, cache, 1, prompt, meter.how.seed)
    return cache
