"""Stock transformers with the same model: the baseline for a method's times, measured in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.register import detach
from kvbench.errors import ConfigError
from kvbench.measure.how import How
from kvbench.measure.point_figures import (
    Figures,
    predicted_point,
    rounded_figures,
    step_percentiles,
    step_times,
    step_traffic,
    weight_bytes,
)
from kvbench.measure.random_fill import random_layers
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.profiling.timing import median, now

#: name of a baseline -> the cache of transformers that it uses, and the kind of its steps
BASELINES = {
    "dynamic": "DynamicCache, eager",
    "static": "StaticCache, eager",
    "static-compiled": 'StaticCache, torch.compile(mode="reduce-overhead")',
    "quanto4": "QuantizedCache, quanto 4 bits",
    "quanto2": "QuantizedCache, quanto 2 bits",
    "hqq4": "QuantizedCache, hqq 4 bits",
}
#: number of the first row's tokens that a point's record keeps
SHOWN = 16


@contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    """Make `model` run transformers' own SDPA attention inside a ``with`` block.

    kvbench's attention is removed and not restored: afterwards the model has the attention that it had before kvbench.
    """
    detach(model)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def stock_cache(name: str, model: Any, length: int) -> Any:
    """Return an empty cache of transformers, of the kind that a baseline (:data:`BASELINES`) uses.

    StaticCache allocates for `length` tokens; the other caches grow.

    Raises:
        ConfigError: the package that the cache needs is not installed.
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
        raise ConfigError(
            "--baselines", name, f"needs a package that is not installed ({error})", hint="pip install 'kvbench[hf]'"
        ) from None


@torch.inference_mode()
def stock_prefill(model: Any, ids: Tensor) -> float:
    """Time one prefill of ``ids`` ``[B, T]`` into transformers' DynamicCache, and return the seconds."""
    return _prefilled(model, ids, stock_cache("dynamic", model, 0))[0]


def _prefilled(model: Any, ids: Tensor, cache: Any) -> tuple[float, Tensor]:
    """Return the seconds of a prefill with the choice of the first new tokens, and these tokens, ``[B, 1]``."""
    started = now(ids.device)
    token = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return now(ids.device) - started, token


@torch.no_grad()
def stock_decode(name: str, model: Any, ids: Tensor, steps: int, fill: str, seed: int = 0) -> dict[str, Any]:
    """Run a prefill and greedy decode steps with a cache of transformers, and return times and peak memory.

    The first decode steps (2, or 6 for compiled baselines) are warm-up steps, which are not timed. They absorb
    compilation and the first replays of CUDA graphs.

    Args:
        name: key of :data:`BASELINES`.
        model: a model that runs transformers' own attention.
        ids: the prompts, ``[B, T]``.
        steps: number of timed decode steps.
        fill: ``prefill`` runs the prompts through the model; ``random`` fills the cache with random keys and values.

    Returns:
        ``prefill_s``: seconds of the prefill; None with ``fill=random``. ``step_s``: seconds of each timed step.
        ``peak``: peak memory in bytes by phase. ``tokens``: the first row's new tokens, those of warm-ups included.
    """
    batch, width = ids.shape
    warm_ups = 6 if name.endswith("compiled") else 2
    cache = stock_cache(name, model, width + steps + warm_ups)
    peaks, seconds = PhasePeaks(ids.device, census=False), None
    with peaks.run():
        if fill == "random":
            random_layers(model, batch, width, seed, lambda index, keys, values: cache.update(keys, values, index))
            token = ids[:, -1:].clone()
        else:
            peaks.phase("prefill")
            seconds, token = _prefilled(model, ids, cache)
        peaks.phase("end")
        release(ids.device)
        run = torch.compile(model.forward, mode="reduce-overhead") if name.endswith("compiled") else model.forward
        position = torch.full((batch, 1), width, device=ids.device)
        step_s, tokens = [], [int(token[0, 0])]
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
            if number >= warm_ups:
                step_s.append(now(ids.device) - started)
            tokens.append(int(token[0, 0]))
        peaks.phase("end")
    return {"prefill_s": seconds, "step_s": step_s, "peak": peaks.row(), "tokens": tokens}


def stock_point(name: str, model: Any, ids: Tensor, how: How) -> Figures:
    """Measure one point with a cache of transformers; return figures under the same keys as :meth:`Meter.point`.

    The model is switched to transformers' own attention. The prompts are ``[B, T]``.
    """
    batch, width = ids.shape
    prefills = []
    with stock_attention(model):
        compiled_anew()
        try:
            for _ in range(how.untimed + how.repeats - 1 if how.fill == "prefill" else 0):
                release(ids.device)
                prefills.append(stock_prefill(model, ids))
            release(ids.device)
            run = stock_decode(name, model, ids, how.new_tokens - 1, how.fill, how.seed)
        finally:
            compiled_anew()
    prefills = [*prefills, run["prefill_s"]][how.untimed :] if how.fill == "prefill" else []
    elements = 2 * batch * width * len(attending(model.config)) * kv_heads(model) * head_dim(model)
    bits = int(name[-1]) if name[-1].isdecimal() else 8 * model.dtype.itemsize
    seconds, step_s = median(prefills) if prefills else None, run["step_s"]
    figures: Figures = {
        "status": "ok",
        "prompt": width,
        "batch": batch,
        "new_tokens": how.new_tokens,
        **({"fill": "random"} if how.fill == "random" else {}),
        "prefill_s": seconds,
        "ttft_s": seconds,
        "repeats": len(prefills),
        "tpot_s": step_times(step_s, sum(step_s) / len(step_s)),
        "itl_s": step_percentiles(step_s, 50, 90, 99),
        "decode_s": sum(step_s),
        "tokens_per_s": None if seconds is None else batch * how.new_tokens / (seconds + sum(step_s)),
        "stepping": BASELINES[name],
        "weights": weight_bytes(model),
        "kv_used": {"total": elements * bits // 8},
        "peak": run["peak"],
        "tokens": run["tokens"][:SHOWN],
    }
    figures["predicted"] = predicted_point(model, figures, width, batch, None, False)
    figures = rounded_figures(figures)
    return figures | step_traffic(model, figures, how.read_rate)


def compiled_anew() -> None:
    """Discard everything that torch.compile has compiled in this process, so that later calls compile again.

    The code of one point would otherwise be reused, or recompiled with dynamic shapes, at a point of another shape.
    """
    torch._dynamo.reset()
