"""Baselines of packed attention: torch's SDPA over 16-bit keys and values, with every back end that supports it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvbench.bench.clock import Time, copies, replayed
from kvbench.bench.shapes import MODELS, Point

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def run_sdpa(query: Tensor, keys: Tensor, values: Tensor, backend: str, packed: bool) -> Tensor:
    """Compute the attention of one decode step with one of the back ends of torch's SDPA.

    No causal mask is applied. One new token needs none. For several new tokens the output is therefore not that of a
    causal model, but the amount of work is the same.

    `backend` is a key of :data:`BACKENDS`. With `packed`, the query heads that share a KV head are folded into the
    dimension of the new tokens, so that the back end reads each key and value once.

    Returns:
        The output in the shape of the queries: ``[B, Hq, q, D]``, or ``[B, H, Hq / H * q, D]`` if `packed`.
    """
    batch, heads, channels = query.shape[0], keys.shape[1], query.shape[3]
    if packed:
        query = query.reshape(batch, heads, -1, channels)
    with sdpa_kernel([BACKENDS[backend]]):
        return sdpa(query, keys, values, enable_gqa=query.shape[1] != heads)


def measure_sdpa(at: Point, dtype: torch.dtype, seconds: float) -> dict[str, Time | str]:
    """Time the attention of one decode step over random 16-bit keys and values with every back end of torch's SDPA.

    Measuring takes `seconds` per back end.

    Returns:
        For each back end, by name, its time, or the error message if it does not support these shapes. For models with
        grouped-query attention, every back end is also timed with the query heads of a group stacked along the query
        dimension (`packed` of :func:`run_sdpa`), under the name ``NAME, heads packed``.
    """
    model = MODELS[at.model]
    shape = (at.batch, model.heads, at.context, model.channels)
    size = 4 * at.batch * model.heads * at.context * model.channels
    query = torch.randn(at.batch, model.query_heads, at.q_len, model.channels, dtype=dtype, device="cuda")
    pairs = [tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)) for _ in range(copies(size))]
    times: dict[str, Time | str] = {}
    grouped = model.query_heads != model.heads
    for name in BACKENDS:
        for packed in (False, True) if grouped else (False,):
            label = f"{name}, heads packed" if packed else name
            calls: list[Callable[[], object]] = [
                lambda k=k, v=v, name=name, packed=packed: run_sdpa(query, k, v, name, packed)  # type: ignore[misc]
                for k, v in pairs
            ]
            try:
                times[label] = replayed(calls, seconds)
            except (RuntimeError, ValueError) as error:  # the back end does not take this shape
                times[label] = " ".join(str(error).split())[:200]
    return times


def fastest_backend(measured: dict[str, Time | str]) -> tuple[str, float] | None:
    """Return the fastest back end of :func:`measure_sdpa` and its time in microseconds; None if none ran."""
    times = [(time.us, name) for name, time in measured.items() if isinstance(time, Time)]
    if not times:
        return None
    us, name = min(times)
    return name, us
