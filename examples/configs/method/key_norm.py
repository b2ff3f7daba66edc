"""Tokens whose keys have the smallest norms stay (kvpress's KnormPress): a method outside the package, in one file."""

from dataclasses import dataclass

from kvbench.methods import ScoredMethod


@dataclass(kw_only=True)
class KeyNorm(ScoredMethod):
    """Half of the prompt is evicted by the norms of its keys (an example from outside the package)."""

    def score(self, keys, values, attention):
        """Return a score of each token, [B, H, n]: the highest stay."""
        return -keys.norm(dim=-1)
