"""Attention of a prompt to itself: torch's SDPA by its fastest back end, and padded batches without a mask of T x T.

Capped scores and sinks, which SDPA has not, are :mod:`kvbench.attention.capped`'s.

Left padding makes every row causal over its own suffix, so a long padded prompt needs no mask: its rows are attended
one by one, from their first real token on. What stands for the mask then is the padding itself, bool ``[B, T]`` (as
transformers' flash attention has it). 128k tokens would make a mask of 16 GiB a row, and a masked SDPA runs on none of
the fast back ends and repeats the keys and values of grouped-query attention for every query head. (Past 2**32 scores
the back end that takes masks is also wrong without a word: pytorch/pytorch issue 187227.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from kvbench.attention import capped
from kvbench.attention.logits import PLAIN, SINKS, SOFTCAP, Logits, logits_of
from kvbench.cache.options import Backend
from kvbench.cache.segments.base import uniform_rows

#: elements of a mask ``[B, 1, T, T]`` from which on the padding stands for it; below, all rows are attended at once
MASK = 1 << 24
#: tokens from which on cuDNN is asked first: it plans once for every new length, which short prompts do not earn back
LONG = 16384
#: cuDNN's offsets are 32-bit numbers
MOST = 1 << 31


def attend(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
    backend: Backend = "auto",
) -> tuple[Tensor, str]:
    """Attend to all tokens so far as transformers' ``sdpa`` does, also with sinks and capped scores.

    Args:
        query: ``[B, Hq, q, D]``.
        keys, values: ``[B, H, n, D]``.
        mask: ``[B or 1, 1, q, n]``; padding ``[B, n]`` (:func:`padding`); None: causal.
        scaling: factor on the scores; None: 1/sqrt(D).
        kwargs: other arguments of the attention interface, sinks and a softcap among them.
        backend: ``auto``: the fastest; ``stock``: the one that torch chooses.

    Returns:
        ``[B, q, Hq, Dv]``, 0 at padding; and what served it, for the row: ``sdpa``, or ``sdpa:cudnn`` where this module
        chose the back end, with ``+sinks`` where they were keys of it; ``capped`` where scores have a softcap.
    """
    logits = logits_of(module, query, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in (SOFTCAP, SINKS)}
    with order(query, keys, values, mask, backend) if logits.softcap is None else nullcontext("capped") as name:
        name = name if logits.sinks is None or logits.softcap is not None else f"{name}+sinks"
        if mask is None or mask.ndim != 2:
            return exact(module, query, keys, values, mask, scaling, logits, kwargs), name
        batch, heads, width = query.shape[:3]
        out = query.new_zeros(batch, width, heads, values.shape[-1])
        starts = (width - mask.sum(1)).tolist()
        for rows in uniform_rows(starts):
            start = starts[rows][0]
            if start < width:
                q, k, v = (x[rows, :, start:] for x in (query, keys, values))
                out[rows, start:] = exact(module, q, k, v, None, scaling, logits, kwargs)
        return out, name


def exact(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    logits: Logits = PLAIN,
    kwargs: dict[str, Any] | None = None,
) -> Tensor:
    """Attend to exact keys and values; as :func:`attend`, with a mask ``[B or 1, 1, q, n]`` or None: causal."""
    kwargs = kwargs or {}
    if logits.plain:
        return sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)[0]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal, count, channels = capped.causal(module, query, mask, kwargs), query.shape[2], values.shape[-1]
    if causal:  # as SDPA has it: the first queries see the first keys
        keys, values = keys[:, :, :count], values[:, :, :count]
    if logits.softcap is not None:
        dropout = float(kwargs.get("dropout") or 0.0)
        return capped.attend(query, keys, values, mask, scaling, logits, causal=causal, dropout=dropout)
    assert logits.sinks is not None
    query, keys, values, mask = capped.with_sinks(query, keys, values, mask, scaling, logits.sinks, causal)
    out = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)[0]
    return out[:, -count:, :, :channels]


def order(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, backend: Backend = "auto"
) -> AbstractContextManager[str]:
    """Return a context in which SDPA asks the fastest back end first; it yields the name of the one that will serve.

    On Hopper and newer cuDNN's kernel is the faster one for long causal prompts (experiments.kernels.prefill times
    both); newer torch asks it first there by itself.
    """
    long = query.shape[2] >= LONG and query.shape[2] == keys.shape[2] and (mask is None or mask.ndim == 2)
    if backend == "stock" or not long or not query.is_cuda or not _prefers(query.device):
        return nullcontext("sdpa")
    if max(x.numel() for x in (query, keys, values)) >= MOST or not _serves(query, keys, values):
        return nullcontext("sdpa")
    return _Named(
        sdpa_kernel(
            [
                SDPBackend.CUDNN_ATTENTION,
                SDPBackend.FLASH_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.MATH,
            ],
            set_priority=True,
        ),
        "sdpa:cudnn",
    )


class _Named(AbstractContextManager[str]):
    """A context that gives a name."""

    def __init__(self, inner: AbstractContextManager[Any], name: str) -> None:
        self._inner, self._name = inner, name

    def __enter__(self) -> str:
        self._inner.__enter__()
        return self._name

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)


@cache
def _prefers(device: torch.device) -> bool:
    """Return True if cuDNN's back end is the faster one on `device`, and this torch can give it priority."""
    can_order = "set_priority" in signature(sdpa_kernel).parameters
    return can_order and torch.cuda.get_device_capability(device) >= (9, 0)


def _serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if cuDNN takes these tensors (dtype, head dimension, strides), as torch sees it."""
    if query.dtype not in (torch.float16, torch.bfloat16) or max(query.shape[-1], values.shape[-1]) > 128:
        return False
    grouped = query.shape[1] != keys.shape[1]
    params = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, True, grouped)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def padding(request: dict[str, Any]) -> Tensor | None:
    """Return the padding ``[B, T]`` (False at padding) if it can stand for the mask that is asked for, else None.

    Args:
        request: keyword arguments of transformers' mask interface.

    Returns:
        None where a mask must be made, or none is needed: not a whole prompt, not plain causal, too short to matter, or
        not padded on the left.
    """
    real, count = request.get("attention_mask"), request.get("q_length")
    plain = request.get("mask_function") is causal_mask_function and request.get("allow_is_causal_skip", False)
    if not plain or real is None or count is None or request.get("local_size") is not None:
        return None
    whole = int(request.get("q_offset", 0)) == 0 and int(request.get("kv_offset", 0)) == 0
    if not whole or tuple(real.shape[1:]) != (count,) or request.get("kv_length") != count:
        return None
    if real.shape[0] * count * count < MASK:
        return None
    real = real.bool()
    left = bool((real[:, :-1] <= real[:, 1:]).all())
    return real if left and not bool(real.all()) else None


def rows_of(mask: Tensor | None, first: int, last: int, width: int) -> Tensor | None:
    """Return the mask of queries ``first .. last`` of ``T = width`` columns, ``[B or 1, 1, last - first, T]``.

    Args:
        mask: of the prompt's new queries, as :func:`attend` takes it; only padding is cut by columns.
    """
    if mask is None:
        return None
    if mask.ndim != 2:
        return mask[..., first:last, :]
    causal = torch.ones(last - first, width, dtype=torch.bool, device=mask.device).tril_(first)
    return causal & mask[:, None, None, :]
