"""Stock transformers on the same model: what a method's times must be compared with, measured in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.register import detach
from kvbench.errors import ConfigError
from kvbench.measure.random_fill import random_layers
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.profiling.timing import median, now, percentile

#: name -> what it is
BASELINES = {
    "dynamic": "DynamicCache, eager",
    "static": "StaticCache, eager",
    "static-compiled": 'StaticCache, torch.compile(mode="reduce-overhead")',
    "quanto4": "QuantizedCache, quanto 4 bits",
    "quanto2": "QuantizedCache, quanto 2 bits",
    "hqq4": "QuantizedCache, hqq 4 bits",
}
#: tokens of the first row that a row of results keeps
SHOWN = 16


@contextmanager
def stock(model: Any) -> Iterator[None]:
    """`model` with torch's SDPA as transformers calls it."""
    detach(model)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def new_cache(name: str, model: Any, length: int) -> Any:
    """The cache of a baseline with room for `length` tokens.

    Raises:
        ConfigError: its package is missing.
    """
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import QuantizedCache

    if name == "dynamic":
        return DynamicCache(config=model.config)
    if name.startswith("static"):
        return StaticCache(config=model.config, max_cache_len=length)
    backend, bits = name[:-1], int(name[-1])
    axis = {"quanto": 0, "hqq": 1}[backend]
    try:
        return QuantizedCache(
            backend, model.config, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128
        )
    except ImportError as error:
        raise ConfigError("--baselines", name, f"needs a package ({error})", hint="pip install 'kvbench[hf]'") from None


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> dict[str, Any]:
    """Time and peak of one prefill of ``ids`` ``[B, T]``: DynamicCache, logits of the last position."""
    cache = new_cache("dynamic", model, 0)
    peaks = PhasePeaks(ids.device, census=False)
    with peaks.run():
        peaks.phase("prefill")
        started = now(ids.device)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits.argmax(-1)
        seconds = now(ids.device) - started
        peaks.phase("end")
    return {"seconds": seconds, "peak": peaks.row()["prefill"]}


@torch.no_grad()
def decode(name: str, model: Any, ids: Tensor, steps: int, fill: str, seed: int = 0) -> dict[str, Any]:
    """Times of `steps` decode steps after the prompt ``ids`` ``[B, T]``, greedy.

    Compilation and the first replays are warm-ups, not among the steps.

    Args:
        name: of :data:`BASELINES`.
        fill: ``prefill`` or ``random``: random keys and values in place of the prompt's.
    """
    batch, width = ids.shape
    warm_ups = 6 if name.endswith("compiled") else 2
    cache = new_cache(name, model, width + steps + warm_ups)
    if fill == "random":
        random_layers(model, batch, width, seed, lambda number, keys, values: cache.update(keys, values, number))
        token = ids[:, -1:].clone()
    else:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        del out
    release(ids.device)
    run = torch.compile(model.forward, mode="reduce-overhead") if name.endswith("compiled") else model.forward
    position = torch.full((batch, 1), width, device=ids.device)
    peaks = PhasePeaks(ids.device, census=False)
    times, seen = [], [token]
    with peaks.run():
        for number in range(warm_ups + steps):
            if number == warm_ups:
                peaks.phase("decode")
            started = now(ids.device)
            if name.endswith("compiled") and ids.is_cuda:
                torch.compiler.cudagraph_mark_step_begin()
            logits = run(
                input_ids=token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            token = logits[:, -1:].argmax(-1).clone()
            position = position + 1
            seen.append(token)
            if number >= warm_ups:
                times.append(now(ids.device) - started)
        peaks.phase("end")
    return {
        "tpot_s": {"median": median(times), **{f"p{q}": percentile(times, q) for q in (10, 90, 99)}, "n": len(times)},
        "peak_decode": peaks.row()["decode"],
        "tokens": [int(each[0, 0]) for each in seen[:SHOWN]],
    }


def compiled_anew() -> None:
    """Forget what was compiled for another shape."""
    torch._dynamo.reset()
