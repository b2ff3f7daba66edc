"""Run options that a cache carries: which kernels serve it and how its prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["auto", "cuda", "triton", "cpu", "reference"]
Backend = Literal["auto", "stock"]


@dataclass(frozen=True)
class Options:
    """Choice of kernels and of the prefill of a cache; ``cache.options = Options(...)`` sets it.

    Args:
        kernels: kernel that computes attention in decode steps. ``auto``: the fastest that can serve the step, or
            torch's SDPA in a layer without packed tokens; a step that is recorded as a CUDA graph uses a kernel there,
            too. ``cuda``, ``triton`` or ``cpu``: this kernel in all layers, or attention in plain torch where it cannot
            serve the step. ``reference``: always attention in plain torch.
        prefill: back end of torch's SDPA for the prompt. ``auto``: the fastest. ``stock``: the one that torch chooses.
        mlp_chunk: number of prompt tokens that feed-forward layers and RoPE process at a time, to save memory
            (:mod:`kvbench.decoding.slices`). ``auto``: 8192 for prompts of more than 16384 tokens, else all at once.
            None: always all at once.
    """

    kernels: Kernels = "auto"
    prefill: Backend = "auto"
    mlp_chunk: int | Literal["auto"] | None = "auto"
