"""Run options that a cache carries: which kernels serve it and how its prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["auto", "cuda", "triton", "reference"]
Backend = Literal["auto", "stock"]


@dataclass(frozen=True)
class Options:
    """Options of one cache, set by ``cache.options = Options(kernels="triton")``.

    Args:
        kernels: kernel of decode attention. ``auto``: the fastest kernel that can serve a step, or torch's SDPA in a
            layer without packed tokens. ``cuda`` or ``triton``: this kernel in all layers, or the reference path if it
            cannot serve the step. ``reference``: no kernel. Steps that are recorded as CUDA graphs use kernels even in
            layers without packed tokens.
        prefill: SDPA back end for the prompt. ``auto``: the fastest. ``stock``: the one that torch chooses.
        mlp_chunk: number of prompt tokens that feed-forward layers and RoPE process at a time, to save memory
            (:mod:`kvbench.decoding.slices`). ``auto``: 8192 for prompts of more than 16384 tokens, else all at once.
            None: always all at once.
    """

    kernels: Kernels = "auto"
    prefill: Backend = "auto"
    mlp_chunk: int | Literal["auto"] | None = "auto"
