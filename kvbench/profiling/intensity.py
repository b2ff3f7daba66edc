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

from kvbench.profiling.gpus import Gpu
from kvbench.profiling.roofline import Shape, linear_activations

Phase = Literal["prefill", "decode"]
Part = Literal["linear", "attention", "aggregate"]


@dataclass(frozen=True)
class Intensity:
    """Operations and memory traffic of some work, whose ratio is its arithmetic intensity.

    Args:
        flops: floating-point operations (in Table 1 of QuantSpec, up to a constant factor).
        mops: bytes loaded and stored (in Table 1 of QuantSpec, elements, up to a constant factor).
    """

    flops: float
    mops: float

    @property
    def value(self) -> float:
        """The arithmetic intensity: FLOPs per memory operation (QuantSpec, sec. 3.1)."""
        return self.flops / self.mops

    def __add__(self, other: Intensity) -> Intensity:
        return Intensity(self.flops + other.flops, self.mops + other.mops)


def table_1(phase: Phase, part: Part, B: int, S_L: int, d: int, k: int = 1) -> Intensity:
    """Return the operations and the memory traffic in one cell of QuantSpec's Table 1.

    The arguments have the names that the table uses.

    Args:
        phase: ``prefill`` or ``decode``.
        part: ``linear`` for linear layers, ``attention``, or ``aggregate`` for both together.
        B: batch size.
        S_L: sequence length.
        d: hidden dimension.
        k: number of tokens generated (decode only).
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
    """Return the limit of the arithmetic intensity, from the last rows of QuantSpec's Table 1.

    The table gives one limit for sequences much shorter than the hidden dimension, and another for much longer ones.
    The first limit is returned if ``S_L < d``, and otherwise the second.

    Args:
        phase: ``prefill`` or ``decode``.
        part: ``linear`` for linear layers, ``attention``, or ``aggregate`` for both together.
        B: batch size.
        S_L: sequence length.
        d: hidden dimension.
    """
    short = d > S_L
    if phase == "decode":
        return {"linear": B, "attention": 1, "aggregate": B if short else 1}[part]
    return {"linear": B * S_L if short else d, "attention": S_L, "aggregate": B * S_L if short else S_L}[part]


def decode_work(
    shape: Shape, batch: int, context: int, new_tokens: int = 1000, width: int = 2
) -> dict[Part, Intensity]:
    """Return the FLOPs and bytes of generating tokens one by one, as QuantSpec's Figure 2 needs them.

    Every step reads all weights of the linear layers and of lm_head, and all keys and values of every sequence.

    Args:
        shape: dimensions of the model.
        batch: number of sequences.
        context: tokens of each sequence before the first step.
        new_tokens: number of tokens generated for each sequence.
        width: bytes of a weight, and of an element of activations, keys and values.

    Returns:
        The work of linear layers (``linear``), of ``attention``, and of both together (``aggregate``).
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
    """Return the FLOPs and bytes of reading prompts in one forward pass, as QuantSpec's Figure 6 needs them.

    Attention is causal and never stores its scores (FlashAttention), so it moves queries, keys, values and outputs
    once. lm_head scores only the last token of each prompt.

    Args:
        shape: dimensions of the model.
        batch: number of prompts.
        context: tokens of each prompt.
        width: bytes of a weight, and of an element of activations, keys and values.

    Returns:
        The work of linear layers (``linear``), of ``attention``, and of both together (``aggregate``).
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
    """Return what limits the speed of some work on a GPU (QuantSpec, sec. 3.1.2).

    Args:
        flops: floating-point operations of the work.
        moved_bytes: bytes that it loads and stores.
        gpu: the GPU.

    Returns:
        ``memory`` if the arithmetic intensity is below the GPU's ridge point, else ``compute``.
    """
    return "memory" if flops / moved_bytes < gpu.ridge else "compute"


def regime(linear_bytes: float, kv_bytes: float) -> Literal["weights", "both", "kv"]:
    """Return whether weights, keys and values, or both are worth quantizing for decoding.

    The rule is that of QuantSpec, end of sec. 3.1.2.

    Args:
        linear_bytes: bytes that linear layers load in a step.
        kv_bytes: bytes that attention loads in a step.

    Returns:
        ``weights`` if linear layers load more than twice as many bytes as attention; ``kv`` if attention loads more
        than twice as many as linear layers; else ``both``.
    """
    if kv_bytes > 2 * linear_bytes:
        return "kv"
    return "weights" if linear_bytes > 2 * kv_bytes else "both"


def accepted(acceptance: float, gamma: int) -> float:
    """Return the expected number of tokens per round of speculation.

    It is ``(1 - a^(g+1)) / (1 - a)`` (Leviathan et al., eq. 1).

    Args:
        acceptance: a, the probability that a drafted token is accepted, independently of the others.
        gamma: g, the number of tokens drafted per round.

    Raises:
        ValueError: `acceptance` is not between 0 and 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance={acceptance} is not a probability from 0 to 1")
    return sum(acceptance**i for i in range(gamma + 1))


def speed_up(acceptance: float, gamma: int, t_ar: float, t_draft: float, t_verify: float) -> float:
    """Return by what factor speculation is faster than plain decoding: ``E * t_ar / (gamma * t_draft + t_verify)``.

    E is the expected number of tokens per round (:func:`accepted`).

    Args:
        acceptance: probability that a drafted token is accepted.
        gamma: number of tokens drafted per round.
        t_ar: time of a step of plain decoding.
        t_draft: time to draft one token, in the same unit.
        t_verify: time of the target's forward pass over the drafted tokens, in the same unit.
    """
    return accepted(acceptance, gamma) * t_ar / (gamma * t_draft + t_verify)


def best_gamma(
    acceptance: float, t_ar: float, t_draft: float, t_verify: float, gammas: range = range(1, 9)
) -> tuple[int, float]:
    """Return the number of drafted tokens per round that gives the largest speed-up, and that speed-up.

    Args:
        acceptance: probability that a drafted token is accepted.
        t_ar: time of a step of plain decoding.
        t_draft: time to draft one token, in the same unit.
        t_verify: time of the target's forward pass over the drafted tokens, in the same unit.
        gammas: numbers to choose from; among equally fast ones, the smallest is returned.
    """
    speed_ups = {gamma: speed_up(acceptance, gamma, t_ar, t_draft, t_verify) for gamma in gammas}
    best = max(speed_ups, key=lambda gamma: (speed_ups[gamma], -gamma))
    return best, speed_ups[best]
