"""The memory that a run is expected to take, from its configuration alone; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError
from kvbench.profiling import roofline

#: bytes of a CUDA context with the kernels' code
CONTEXT = 600 << 20
#: tokens of an answer if neither the configuration nor the data set says how many
ANSWER = 128


def peak_bytes(checked: RunConfig) -> int | None:
    """Return the bytes of GPU memory that a run is expected to take at most; None if its model is not known.

    They are those of the weights, the keys and values of the longest possible prompt with its answer, the activations
    of the largest forward pass (:mod:`kvbench.profiling.roofline`), and the CUDA context. The cache of a method without
    a formula for its bytes counts as one in full precision.
    """
    shape = _shape(checked)
    if shape is None:
        return None
    runtime, width, stored = checked.runtime, _width(checked), 4 if checked.model.dtype == "float32" else 2
    prompt, new, batch = longest(checked)
    weights = _weights(checked, shape)
    at_once = roofline.tokens_of_a_pass(batch, prompt, runtime.prefill_chunk, runtime.prefill_rows)
    alive = roofline.live_elements(shape, at_once, runtime.mlp_chunk) * width
    logits = batch * shape.vocabulary * (width + 4)
    return round(weights + batch * _cache_bytes(checked, shape, prompt, new, stored) + max(alive, logits) + CONTEXT)


def check_fits(checked: RunConfig) -> None:
    """Raise ConfigError if the weights alone take more than ``runtime.memory_limit_gb``.

    Nothing is refused where the size of the weights is not known: no sizes are on this machine, a checkpoint is
    quantized, or the weights are spread over several devices.
    """
    limit, model, runtime = checked.runtime.memory_limit_gb, checked.model, checked.runtime
    if limit is None or runtime.device_map is not None or runtime.tensor_parallel is not None:
        return
    shape = _shape(checked)
    if shape is None or not (model.random or (model.folder() and not model.dimensions().get("quantization_config"))):
        return
    needed = _weights(checked, shape) / 2**30
    if needed <= limit:
        return
    smaller = "" if model.rounding else f", or model.weights={'random_int4' if model.random else 'int4'}"
    raise ConfigError(
        "runtime.memory_limit_gb",
        limit,
        f"the weights of {model.name} alone take {needed:.1f} GiB, before any keys, values or activations",
        allowed=f"more than {needed:.1f}",
        hint=f"runtime.memory_limit_gb={math.ceil(1.2 * needed)}{smaller}, or choose a smaller model",
    )


def _shape(checked: RunConfig) -> roofline.Shape | None:
    try:
        return roofline.Shape.of(checked.model.dimensions())
    except (ConfigError, KeyError, TypeError):
        return None


def _width(checked: RunConfig) -> int:
    """Return the bytes of a weight or an activation; with ``runtime.arithmetic=auto`` those of the storage."""
    return 4 if "float32" in (checked.model.dtype, checked.runtime.arithmetic) else 2


def _weights(checked: RunConfig, shape: roofline.Shape) -> int:
    """Return the bytes of the weights on the device; with ``model.dtype=auto`` they have 16 bits."""
    if not checked.model.rounding:
        return shape.weight_bytes() * (_width(checked) // 2)
    return shape.weight_bytes(4, 128, 16 if checked.model.rounding == "int4" else None)


def longest(checked: RunConfig) -> tuple[int, int, int]:
    """Return the tokens of the longest possible prompt, those of an answer, and the largest batch of a run."""
    data, most = checked.dataset, checked.model.max_length
    new = checked.decoding.max_new_tokens or _largest(data, ("max_new_tokens", "new_tokens")) or ANSWER
    wanted = _largest(data, ("lengths", "prompts", "window", "length"))
    limits = [limit for limit in (checked.model.prompt_limit, wanted, most - new) if limit]
    prompt = max(1, min(limits, default=1)) if wanted is None or wanted <= most else wanted
    return prompt, new, _largest(data, ("batches",)) or checked.runtime.batch_size


def _cache_bytes(checked: RunConfig, shape: roofline.Shape, prompt: int, new: int, width: int) -> int:
    from kvbench.methods.bytes import kv_bytes

    try:
        predicted = kv_bytes(
            checked.method,
            prompt + new,
            prompt=prompt,
            layers=shape.layers,
            query_heads=shape.query_heads,
            heads=shape.heads,
            channels=shape.channels,
            width=width,
            windows=shape.windows,
        )
    except (ConfigError, NotImplementedError):  # a method without a formula: as in full precision
        return shape.kv_bytes(prompt + new, width)
    return int(predicted.total)


def _largest(data: Any, keys: Iterable[str]) -> int | None:
    """Return the largest whole number among the values of some keys, which may be lists; None if there is none."""
    numbers: list[int] = []
    for key in keys:
        value = data.get(key)
        numbers += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, int)]
    return max(numbers, default=None)
