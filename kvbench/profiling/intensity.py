"""Arithmetic intensity of inference, and the speed-up of speculation: QuantSpec's analysis.

Source: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache" (2025), sec. 3.1,
Table 1 (FLOPs, memory operations and intensity of prefill and decoding by linear layers, attention and both together)
and sec. 3.1.2 (ridge point). The speed-up is that of Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (2023), eq. 1 and theorem 3.8, with measured or predicted times in place of a cost ratio.

The table gives its terms in ``O(.)``; in :func:`table_1` each has the factor 1. :func:`decode_work` and
:func:`prefill_work` count the FLOPs and bytes of a model of given dimensions, as the paper's Figures 2 and 6 need them.
Times are predicted by :mod:`kvbench.profiling.roofline`, not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.profiling.roofline import Gpu, Shape, linear_activations

Phase = Literal["prefill", "decode"]
Part = Literal["linear", "attention", "aggregate"]


@dataclass(frozen=True)
class Intensity:
    """FLOPs and memory traffic of a computation; their ratio, :attr:`value`, is its arithmetic intensity.

    Args:
        flops: floating-point operations. From :func:`table_1`, only up to a constant factor.
        mops: bytes loaded and stored. From :func:`table_1`, elements instead of bytes, and only up to a constant
            factor.
    """

    flops: float
    mops: float

    @property
    def value(self) -> float:
        """Arithmetic intensity: FLOPs divided by memory traffic (QuantSpec, sec. 3.1)."""
        return self.flops / self.mops

    def __add__(self, other: Intensity) -> Intensity:
        return Intensity(self.flops + other.flops, self.mops + other.mops)


def table_1(phase: Phase, part: Part, B: int, S_L: int, d: int, k: int = 1) -> Intensity:
    """Return the FLOPs and memory operations that QuantSpec's Table 1 gives for one phase and part of the model.

    The table states them as ``O(.)``; each term is taken with the factor 1. The arguments have the table's names: batch
    size, sequence length, hidden dimension, and number of tokens generated (decode only).
    """
    if part == "aggregate":
        return table_1(phase, "linear", B, S_L, d, k) + table_1(phase, "attention", B, S_L, d, k)
    if phase == "prefill":
        if part == "linear":
            return Intensity(B * S_L * d**2, B * S_L * d + d**2)  # activations + weights
        return Intensity(B * S_L**2 * d, B * S_L + B * S_L * d)  # scores (FlashAttention) + Q, C_K, C_V
    if part == "linear":
        return Intensity(k * B * d**2, k * B * d + k * d**2)  # activations + weights
    return Intensity(k * B * S_L * d, k * B * S_L + k * B * S_L * d)  # scores + C_K, C_V


def asymptote(phase: Phase, part: Part, B: int, S_L: int, d: int) -> float:
    """Return the arithmetic intensity in the limit of short or of long sequences (last rows of QuantSpec's Table 1).

    The table has one limit for sequences much shorter than the hidden dimension, used here if ``S_L < d``, and one for
    much longer sequences, used otherwise. Arguments are those of :func:`table_1`.
    """
    short = d > S_L
    if phase == "decode":
        return {"linear": B, "attention": 1, "aggregate": B if short else 1}[part]
    return {"linear": B * S_L if short else d, "attention": S_L, "aggregate": B * S_L if short else S_L}[part]


def decode_work(
    shape: Shape, batch: int, context: int, new_tokens: int = 1000, width: int = 2
) -> dict[Part, Intensity]:
    """Count the FLOPs and bytes of all decode steps of a generation, one token per step (for QuantSpec's Figure 2).

    Every step reads all weights of the linear layers and of lm_head, and all keys and values of every sequence.

    `context` tokens of each sequence come before the first step; `width` is the bytes of a weight, and of an element of
    activations, keys and values.
    """
    weights = shape.linear_elements + shape.head_elements
    activations = batch * (shape.layers * linear_activations(shape) + shape.hidden + shape.vocabulary)
    linear = Intensity(2 * weights * batch * new_tokens, width * (weights + activations) * new_tokens)
    seen = new_tokens * context + new_tokens * (new_tokens + 1) // 2  # tokens attended to, over all steps
    heads = batch * shape.layers * shape.channels
    queries = 2 * shape.query_heads * heads * new_tokens  # queries and outputs
    attention = Intensity(4 * shape.query_heads * heads * seen, width * (2 * shape.heads * heads * seen + queries))
    return {"linear": linear, "attention": attention, "aggregate": linear + attention}


def prefill_work(shape: Shape, batch: int, context: int, width: int = 2) -> dict[Part, Intensity]:
    """Count the FLOPs and bytes of a prefill in a single forward pass (for QuantSpec's Figure 6).

    Attention is causal and, as in FlashAttention, keeps its scores on the chip: only queries, keys, values and outputs
    are moved, once each. Logits are computed for the last token of each prompt only.

    Arguments and result are those of :func:`decode_work`.
    """
    tokens = batch * context
    head = batch * (shape.hidden + shape.vocabulary)
    linear = Intensity(
        2 * shape.linear_elements * tokens + 2 * shape.head_elements * batch,
        width
        * (shape.linear_elements + shape.head_elements + tokens * shape.layers * linear_activations(shape) + head),
    )
    heads = batch * shape.layers * shape.channels
    moved = (2 * shape.query_heads + 2 * shape.heads) * heads * context
    attention = Intensity(4 * shape.query_heads * heads * (context * (context + 1) // 2), width * moved)
    return {"linear": linear, "attention": attention, "aggregate": linear + attention}


def bound(flops: float, moved_bytes: float, gpu: Gpu) -> Literal["memory", "compute"]:
    """Return ``memory`` if a computation's arithmetic intensity is below the GPU's ridge point, else ``compute``.

    Source: QuantSpec, sec. 3.1.2.
    """
    return "memory" if flops / moved_bytes < gpu.ridge else "compute"


def regime(linear_bytes: float, kv_bytes: float) -> Literal["weights", "both", "kv"]:
    """Return what to quantize for faster decoding: the weights, the KV cache, or both.

    The rule is that of QuantSpec, end of sec. 3.1.2: whatever dominates the bytes that a decode step loads, by more
    than a factor of 2; else both.
    """
    if kv_bytes > 2 * linear_bytes:
        return "kv"
    return "weights" if linear_bytes > 2 * kv_bytes else "both"


def accepted(acceptance: float, gamma: int) -> float:
    """Return the expected number of tokens that one round of speculative decoding produces.

    A round drafts g tokens and verifies them in one pass. The result is ``(1 - a^(g+1)) / (1 - a)`` (Leviathan et al.,
    eq. 1), which includes the token that the verifying pass itself adds.

    `acceptance` is a, the same for every token and independent of the others; `gamma` is g.

    Raises:
        ValueError: `acceptance` is not between 0 and 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance={acceptance} is not a probability from 0 to 1")
    return sum(acceptance**i for i in range(gamma + 1))


def speculative_speed_up(acceptance: float, gamma: int, t_ar: float, t_draft: float, t_verify: float) -> float:
    """Return the speed-up of speculative over plain decoding: ``E * t_ar / (gamma * t_draft + t_verify)``.

    E is the expected number of tokens per round (:func:`accepted`). `t_ar` is the time of a step of plain decoding,
    `t_draft` that of one drafted token, and `t_verify` that of the target's pass over the drafts, in the same unit.
    """
    return accepted(acceptance, gamma) * t_ar / (gamma * t_draft + t_verify)


def best_gamma(
    acceptance: float, t_ar: float, t_draft: float, t_verify: float, gammas: range = range(1, 9)
) -> tuple[int, float]:
    """Find the number of drafted tokens per round that maximizes :func:`speculative_speed_up`; return both.

    If several are equally fast, the smallest is returned.
    """
    speed_ups = {gamma: speculative_speed_up(acceptance, gamma, t_ar, t_draft, t_verify) for gamma in gammas}
    best = max(speed_ups, key=lambda gamma: (speed_ups[gamma], -gamma))
    return best, speed_ups[best]
