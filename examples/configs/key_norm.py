"""Tokens whose keys have the smallest norms stay (kvpress's KnormPress): a method outside the package."""

from dataclasses import dataclass

from kvbench.methods import ScoredMethod


@dataclass(kw_only=True)
class KeyNorm(ScoredMethod):
    """Keep a share of the prompt by the norms of its keys, `budget`; generated tokens all stay."""

    def score(self, keys, values, attention):
        """Return a score of each token, [B, H, n]: the highest stay."""
        return -keys.norm(dim=-1)
