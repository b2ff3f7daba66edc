"""Attention of a prompt to itself: torch's SDPA on its fastest back end, or in bounded memory with a softcap or sinks.

Torch's SDPA supports neither softcaps nor sinks. Sinks are turned into one extra key, so that SDPA's fast back ends can
serve them. Every query gets a few extra channels that hold its head's sink. Ordinary keys are zero in these channels.
The extra key is one in them and zero elsewhere, and its value is zero. A softcap is not linear in the scores and cannot
be expressed that way, so capped scores are computed here, for some KV heads and a block of queries at a time.

With left padding every row is causal over its own suffix, so a long padded prompt needs no mask: its rows are computed
one by one, each starting at its first real token. In place of the mask, the padding itself is passed, bool ``[B, T]``
(as for transformers' flash attention). For 128k tokens a mask would take 16 GiB per row. SDPA with a mask also has
three other disadvantages. It cannot use the fast back ends. It copies the keys and values of grouped-query attention
for every query head. Beyond 2**32 scores it gives wrong results without an error (pytorch/pytorch issue 187227).
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

from kvbench.attention.logits import PLAIN, SINKS, SOFTCAP, Logits, logits_of
from kvbench.cache.progress import Backend
from kvbench.cache.segments.base import uniform_rows

#: scores that are computed at a time: 64 MiB in fp32 (about four such tensors exist at once); fewer on a CPU, whose
#: caches should hold them
SCORES = {"cpu": 1 << 20}
MOST_SCORES = 1 << 24
#: channels that are added for a sink. Three would do: a sum of three numbers of any dtype represents a sink exactly.
#: Eight keep the alignment that SDPA's fast back ends require
CHANNELS = 8


def with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Express a model's attention sinks as one extra key before all others, so that plain SDPA can compute them.

    Extra channels are appended to queries and keys, such that the score of a query with the extra key is the sink of
    that query's head. The value of the extra key is zero.

    Args:
        mask: ``[B or 1, Hq or 1, q, n]`` (bool or additive), or None.
        scaling: factor by which the scores of tokens are multiplied; sinks are not multiplied.
        causal: True if `mask` is None and attention is causal. A query of zeros is then put in front as well, so that
            SDPA's causal mask still lets query i see key i.

    Returns:
        Four arguments for SDPA: query, keys and values with 8 extra channels and the extra key in front, and the mask.
        In SDPA's output, only the last q queries and the first Dv channels are meaningful.
    """
    batch, heads, count, channels = query.shape
    # clamped to the range of fp16 (65504): a sink that far from all scores takes all of the probability, or none
    parts, rest = query.new_zeros(heads, CHANNELS), (sinks.float() / scaling).clamp(-3e4, 3e4)
    for i in range(3):
        parts[:, i] = rest.to(query.dtype)
        rest = rest - parts[:, i].float()
    query = torch.cat([query, parts[None, :, None].expand(batch, heads, count, CHANNELS)], -1)
    pad = torch.nn.functional.pad
    if causal:
        query = pad(query, (0, 0, 1, 0))
    first = keys.new_zeros(*keys.shape[:2], 1, channels + CHANNELS)
    first[..., channels : channels + 3] = 1
    keys = torch.cat([first, pad(keys, (0, CHANNELS))], 2)
    values = pad(values, (0, CHANNELS, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return query, keys, values, mask


def attend_capped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    logits: Logits,
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with a softcap, for a few KV heads and queries at a time to bound the memory for scores.

    Args:
        query: queries of the new tokens, ``[B, Hq, q, D]``. With a causal mask, these are the last q of the n tokens.
        mask: ``[B or 1, Hq or 1, q, n]`` (bool or additive), or None.
        causal: what ``mask=None`` means. True: causal attention. False: every query sees every key.
        dropout: probability with which attention weights are dropped (training).
    """
    batch, query_heads, count, _ = query.shape
    heads, width = keys.shape[1:3]
    group = query_heads // heads
    most = SCORES.get(query.device.type, MOST_SCORES)
    wide = min(max(1, most // (batch * group * width * min(count, 128))), heads)
    outs = []
    for head in range(0, heads, wide):
        kv, q = slice(head, head + wide), slice(head * group, (head + wide) * group)
        part_keys, block = keys[:, kv], max(1, most // (batch * keys[:, kv].shape[1] * group * width))
        parts = []
        for first in range(0, count, block):
            last = min(first + block, count)
            stop = width - count + last if mask is None and causal else width
            visible = mask if mask is None else mask[:, q if mask.shape[1] > 1 else slice(None), first:last]
            if mask is None and causal:
                visible = torch.ones(last - first, stop, dtype=torch.bool, device=query.device)
                visible = visible.tril(width - count + first)[None, None]
            parts.append(
                _tile(
                    query[:, q, first:last],
                    part_keys[:, :, :stop],
                    values[:, kv, :stop],
                    visible,
                    scaling,
                    logits.sinks_of(q),
                    dropout,
                )
            )
        outs.append(torch.cat(parts, 2))
    return torch.cat(outs, 1).transpose(1, 2).contiguous()


def _tile(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, logits: Logits, dropout: float
) -> Tensor:
    """Return the attention ``[B, Hq, q, Dv]`` of a few queries ``[B, Hq, q, D]``, with all their scores in fp32."""
    batch, query_heads, count, _ = query.shape
    heads = keys.shape[1]
    rows = query.reshape(batch * heads, -1, query.shape[-1])
    scores = _product(rows, keys.flatten(0, 1).transpose(1, 2)).view(batch, query_heads, count, -1)
    scores = logits.capped(scores * scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    sink = logits.column(scores)
    weights = torch.softmax(scores if sink is None else torch.cat([scores, sink], -1), -1)
    weights = weights[..., : scores.shape[-1]].nan_to_num(0.0)  # padding sees nothing
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    weights = weights.to(values.dtype).view(batch * heads, -1, scores.shape[-1])
    out = _product(weights, values.flatten(0, 1))
    return out.view(batch, query_heads, count, -1).to(query.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product ``[N, m, n]`` of batches ``[N, m, k]`` and ``[N, k, n]``, accumulated in fp32.

    Half precision on a GPU is multiplied by tensor cores; everything else is converted to fp32 first.
    """
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16) and not torch.is_grad_enabled():
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def is_causal(module: torch.nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return True if a causal mask must be applied, by the rule of transformers' ``sdpa``.

    That is the case only if no mask is given, there is more than one query, and ``is_causal`` is True.

    Args:
        module: the model's attention module; its attribute ``is_causal`` is used unless `kwargs` contain ``is_causal``.
        query: queries of the new tokens, ``[B, Hq, q, D]``. For a single query (q = 1) the result is False, because it
            sees all keys.
    """
    given = kwargs.get("is_causal")
    return mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if given is None else given)


#: size of a mask ``[B, 1, T, T]``, in elements, from which the padding replaces it; with smaller masks all rows are
#: computed at once
MASK = 1 << 24
#: prompt length from which cuDNN is preferred: it makes a plan for every new length, which short prompts do not repay
LONG = 16384
#: cuDNN's offsets are 32-bit numbers
MOST = 1 << 31


def attend_prompt(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
    backend: Backend = "auto",
    lse: Tensor | None = None,
) -> tuple[Tensor, str]:
    """Compute attention as transformers' ``sdpa`` does, but with support for sinks and softcaps.

    Args:
        mask: one of: a mask ``[B or 1, 1, q, n]``; bool ``[B, n]``, False at padding (:func:`padding`); None for causal
            attention.
        backend: SDPA back end. ``auto``: the fastest. ``stock``: the one that torch chooses.
        lse: buffer, fp32 ``[B, Hq, q]``, for the natural logarithm of the sum of each query's exponentials; only where
            :func:`leaves_lse` is True. None: not wanted.

    Returns:
        The output ``[B, q, Hq, Dv]``, with zeros at padding; and the name of the implementation, which results show.
        The name is ``sdpa`` if torch chose the back end, ``sdpa:cudnn`` if this module preferred cuDNN's, or ``capped``
        if scores have a softcap. ``+sinks`` is appended to the first two if sinks were added as a key.
    """
    logits = logits_of(module, query, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in (SOFTCAP, SINKS)}
    with order(query, keys, values, mask, backend) if logits.softcap is None else nullcontext("capped") as name:
        name = name if logits.sinks is None or logits.softcap is not None else f"{name}+sinks"
        if mask is None or mask.ndim != 2:
            return attend_exact(module, query, keys, values, mask, scaling, logits, kwargs, lse), name
        batch, heads, width = query.shape[:3]
        out = query.new_zeros(batch, width, heads, values.shape[-1])
        starts = (width - mask.sum(1)).tolist()
        for rows in uniform_rows(starts):
            start = starts[rows][0]
            if start < width:
                q, k, v = (x[rows, :, start:] for x in (query, keys, values))
                part = None if lse is None else lse[rows, :, start:]
                out[rows, start:] = attend_exact(module, q, k, v, None, scaling, logits, kwargs, part)
        return out, name


def attend_exact(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    logits: Logits = PLAIN,
    kwargs: dict[str, Any] | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute attention over exact keys and values without padding; `lse` is as for :func:`attend_prompt`."""
    kwargs = kwargs or {}
    if lse is not None:
        out, sums = _flash(query, keys, values, mask, scaling, is_causal(module, query, mask, kwargs))
        lse.copy_(sums)
        return out.transpose(1, 2).contiguous()
    if logits.plain:
        return sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)[0]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal, count, channels = is_causal(module, query, mask, kwargs), query.shape[2], values.shape[-1]
    if causal:  # like SDPA, which aligns a causal mask with the first key: query i sees keys up to i
        keys, values = keys[:, :, :count], values[:, :, :count]
    if logits.softcap is not None:
        dropout = float(kwargs.get("dropout") or 0.0)
        return attend_capped(query, keys, values, mask, scaling, logits, causal=causal, dropout=dropout)
    assert logits.sinks is not None
    query, keys, values, mask = with_sinks(query, keys, values, mask, scaling, logits.sinks, causal)
    out = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)[0]
    return out[:, -count:, :, :channels]


#: number of flash attention among the back ends between which ``torch._fused_sdp_choice`` chooses
FLASH = 1


def leaves_lse(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, logits: Logits, kwargs: dict[str, Any]
) -> bool:
    """Return True if :func:`attend_prompt` can also return log-sum-exps, because torch's kernel for CPUs serves it."""
    if query.device.type != "cpu" or not logits.plain or kwargs.get("dropout") or torch.is_grad_enabled():
        return False
    if keys.dtype != query.dtype or values.dtype != query.dtype:
        return False
    one = query[:, :, :1]
    return bool(torch._fused_sdp_choice(one, keys, values, None, enable_gqa=keys.shape[1] != query.shape[1]) == FLASH)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what SDPA's kernel for CPUs returns: the output ``[B, Hq, q, Dv]``, and each query's log-sum-exp."""
    group = query.shape[1] // keys.shape[1]
    if group > 1:  # as SDPA itself does before it calls the kernel
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling)
    return out, lse


def order(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, backend: Backend = "auto"
) -> AbstractContextManager[str]:
    """Return a context manager that selects the fastest SDPA back end for a prompt.

    For long causal prompts on Hopper and newer GPUs, this is cuDNN's kernel (experiments.kernels.prefill compares its
    time with that of the others). Newer versions of torch prefer it there by themselves. In all other cases torch
    chooses.

    Args:
        mask: as for :func:`attend_prompt`. With a mask ``[B or 1, 1, q, n]``, torch chooses the back end.
        backend: ``auto`` for the fastest; ``stock`` to let torch choose in all cases.

    Returns:
        A context manager. Its ``with ... as`` value is the name that results show: ``sdpa:cudnn`` if cuDNN is tried
        first, else ``sdpa``.
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
    """A context manager that wraps another one, and whose ``with ... as`` value is a name."""

    def __init__(self, inner: AbstractContextManager[Any], name: str) -> None:
        self._inner, self._name = inner, name

    def __enter__(self) -> str:
        self._inner.__enter__()
        return self._name

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)


@cache
def _prefers(device: torch.device) -> bool:
    """Return True if cuDNN's back end is the fastest on `device` and this version of torch can prioritize it."""
    can_order = "set_priority" in signature(sdpa_kernel).parameters
    return can_order and torch.cuda.get_device_capability(device) >= (9, 0)


def _serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if cuDNN supports these tensors (dtype, head dimension, strides), according to torch."""
    if query.dtype not in (torch.float16, torch.bfloat16) or max(query.shape[-1], values.shape[-1]) > 128:
        return False
    grouped = query.shape[1] != keys.shape[1]
    params = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, True, grouped)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def padding(request: dict[str, Any]) -> Tensor | None:
    """Return which tokens of a batch are padding, if attention needs only this in place of a full mask.

    The padding can replace the mask if four conditions hold: the request is for plain causal attention over a whole
    prompt; all padding is on the left; at least one row has padding; and the mask would have at least :data:`MASK`
    elements.

    Returns:
        bool ``[B, T]``, False at padding; or None if the batch needs the usual mask, or no mask at all.
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
    """Return the part of an attention mask that applies to queries `first` to `last`, excluding `last`.

    Args:
        mask: mask of the new queries, as :func:`attend_prompt` takes it. Padding ``[B, T]`` is expanded to a causal
            mask; the new queries must then be the whole prompt. None is returned unchanged.
        first: index of the first query, counted from the first new one.

    Returns:
        ``[B or 1, 1, last - first, T]``, or None.
    """
    if mask is None:
        return None
    if mask.ndim != 2:
        return mask[..., first:last, :]
    causal = torch.ones(last - first, width, dtype=torch.bool, device=mask.device).tril_(first)
    return causal & mask[:, None, None, :]
