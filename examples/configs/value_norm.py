"""Tokens with large values behind small keys stay, and are packed: eviction and quantization, a scorer of one line."""

from dataclasses import dataclass

from kvbench.methods import KeepMethod


@dataclass(kw_only=True)
class ValueNorm(KeepMethod):
    """Keep a share of the prompt by the norms of its values and keys, and pack it."""

    def score(self, keys, values, attention):
        """Return a score of each token, [B, H, n]: the highest stay."""
        return values.norm(dim=-1) / keys.norm(dim=-1)
