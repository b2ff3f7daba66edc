"""Choices of a run that a cache carries: which kernels serve it and how its prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["auto", "cuda", "triton", "reference"]
Backend = Literal["auto", "stock"]


@dataclass(frozen=True)
class Options:
    """Options of one cache (``cache.options = Options(kernels="triton")``); no two caches share them.

    Args:
        kernels: the decode attention: ``auto``: the fastest kernel that serves a step; ``cuda``, ``triton``: this one
            or the reference path, also for layers without packed tokens, as captured steps always have it;
            ``reference``: no kernel.
        prefill: the back end of the prompt's SDPA: ``auto``: the fastest; ``stock``: the one that torch chooses.
        mlp_chunk: tokens of a long prompt that feed-forward layers and RoPE process at a time; ``auto``: 8192, in
            prompts of more than 16384; None: all at once (:mod:`kvbench.decoding.slices`).
    """

    kernels: Kernels = "auto"
    prefill: Backend = "auto"
    mlp_chunk: int | Literal["auto"] | None = "auto"
