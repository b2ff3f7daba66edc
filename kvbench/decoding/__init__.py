"""Prefill and decode loops."""

from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.sampling import Sampling

__all__ = ["Generation", "Sampling", "generate"]
