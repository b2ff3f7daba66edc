"""Run options that a cache carries: which kernels serve it and how its prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["auto", "cuda", "triton", "reference"]
Backend = Literal["auto", "stock"]


@dataclass(frozen=True)
class Options:
    """Options of one cache (``cache.options = Options(kernels="triton")``).

    Args:
        kernels: kernel of decode attention. ``auto`` takes the fastest one that serves a step, and torch's SDPA in
            layers without packed tokens; ``cuda`` or ``triton`` takes that one in all layers, or the reference path
            where it does not serve; ``reference`` takes no kernel. Captured steps use kernels in layers without packed
            tokens, too.
        prefill: back end of the prompt's SDPA. ``auto`` takes the fastest, ``stock`` the one that torch chooses.
        mlp_chunk: number of prompt tokens that feed-forward layers and RoPE process at a time; ``auto`` is 8192 in
            prompts of more than 16384 tokens; None is all at once (:mod:`kvbench.decoding.slices`).
    """

    kernels: Kernels = "auto"
    prefill: Backend = "auto"
    mlp_chunk: int | Literal["auto"] | None = "auto"
