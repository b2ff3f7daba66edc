"""Calibrated scales of fp8 caches: one for each layer and side, or for each KV head, and their file.

``python -m kvbench.calibrate method=engine`` runs a text and records the magnitudes of queries and keys after RoPE, and
of values. A scale maps the largest of them (min-max), or a percentile, to the largest e4m3 number; what is larger
saturates. The tensors of a file are ``query``, ``key`` and ``value``, fp32 ``[layers, H]`` (heads that share a scale
have equal ones); ``probe.*`` is a sample of the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.calibration.rotate import attended
from kvbench.calibration.stored import Stored, probe, versions
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads
from kvbench.quantizers.engine.base import E4M3_MAX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the tensors that have scales, in the order of attention's arguments
SIDES = ("query", "key", "value")
#: classes of magnitudes: the upper 16 bits of a positive fp32 number, which is within 1 in 128 of others of its class
CLASSES = 1 << 15


@dataclass
class Scales(Stored):
    """Calibrated scales of one model's fp8 cache, as a calibration file holds them (see :class:`Stored`)."""

    FORMAT: ClassVar[str] = "kvbench-fp8-1"
    ARGUMENTS: ClassVar[str] = " method=engine"

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a complete file must contain, given its metadata."""
        for side in SIDES:
            yield side, self.shape[:2]

    def defect(self, name: str, tensor: Tensor) -> str | None:
        """Return what is wrong with scales, which must be above 0; see :meth:`Stored.defect`."""
        return None if bool((tensor > 0).all()) else "has scales that are not above 0"

    def of(self, side: str, layer: int, heads: slice) -> float | Tensor:
        """Return the scales of some KV heads of a layer, fp32 ``[H]``; a number if the heads of a layer share one."""
        scales = self.tensors[side][layer]
        return scales[heads] if self.info["heads"] == "each" else float(scales[0])


def classes_of(x: Tensor) -> Tensor:
    """Return how many numbers of each KV head have a magnitude of each class, int64 ``[H, CLASSES]``.

    Args:
        x: ``[n, heads, D]``.
    """
    upper = (x.float().abs().contiguous().view(torch.int32) >> 16).long()
    heads = x.shape[1]
    shifted = upper + torch.arange(heads, device=x.device)[:, None] * CLASSES
    return torch.bincount(shifted.flatten(), minlength=heads * CLASSES).view(heads, CLASSES).cpu()


def percentile_of(counts: Tensor, share: float) -> Tensor:
    """Return the magnitude that a share of the numbers does not exceed, fp32 ``[...]``, from counts ``[..., CLASSES]``.

    It is the upper end of the class in which the share is reached.
    """
    reached = counts.cumsum(-1) >= (counts.sum(-1, keepdim=True).double() * share).ceil().clamp(min=1)
    first = reached.to(torch.uint8).argmax(-1).to(torch.int32)
    return ((first << 16) | 0xFFFF).view(torch.float32)


def scales(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    name: str,
    percentile: float | None = None,
    per_head: bool = False,
    first_tokens: int = 0,
    text_sha256: str = "",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Scales:
    """Compute the scales of fp8 queries, keys and values for every layer of a model.

    Args:
        sequences: token ids ``[S, L]``.
        name: recorded in the result, as is `text_sha256`.
        percentile: percentage of the magnitudes that the largest e4m3 number is for; None: all of them (min-max).
        per_head: True for a scale per KV head (queries: per group of query heads), False for one per layer and side.
        first_tokens: number of tokens at the start of each sequence that are left out.
        tell: function called after each sequence with the number of sequences done and their total.

    Raises:
        ModelError: kvbench does not support the model's attention, or a query, key or value is not finite.
    """
    heads, layers = kv_heads(model), len(attending(model.config))
    most = torch.zeros(len(SIDES), layers, heads)
    counts = torch.zeros(len(SIDES), layers, heads, CLASSES, dtype=torch.int64) if percentile is not None else None
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(done, len(sequences))

    def seen(layer: int, *tensors: Tensor) -> None:
        for side, x in enumerate(tensors):
            grouped = x[first_tokens:].unflatten(1, (heads, -1)).flatten(2)  # a KV head's query heads as more channels
            most[side, layer] = torch.maximum(most[side, layer], grouped.float().abs().amax((0, 2)).cpu())
            if counts is not None:
                counts[side, layer] += classes_of(grouped)

    attended(model, sequences, seen, step)
    if counts is not None and percentile is not None:
        shared = counts if per_head else counts.sum(2, keepdim=True)
        largest = torch.minimum(percentile_of(shared, percentile / 100), most if per_head else most.amax(2, True))
    else:
        largest = most if per_head else most.amax(2, keepdim=True)
    # heads of which the text shows zeros alone keep the scale 1: a tiny one would saturate whatever comes later
    per_kv_head = torch.where(largest > 0, largest / E4M3_MAX, 1.0).expand(-1, -1, heads)
    info = {
        "format": Scales.FORMAT,
        "model": name,
        "rule": "minmax" if percentile is None else f"percentile {percentile:g}",
        "heads": "each" if per_head else "shared",
        "layers": str(layers),
        "kv_heads": str(heads),
        "head_dim": str(head_dim(model)),
        "first_tokens": str(first_tokens),
        "sequences": str(len(sequences)),
        "tokens": str(sequences.numel()),
        "text_sha256": text_sha256,
        **versions(),
    }
    return Scales(info, {**probe(model), **dict(zip(SIDES, per_kv_head.contiguous(), strict=True))})
