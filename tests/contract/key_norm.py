"""Tokens whose keys have the smallest norms stay (kvpress's KnormPress): a method from outside the package."""

from dataclasses import dataclass

from kvbench.methods import ScoredMethod


@dataclass(kw_only=True)
class KeyNorm(ScoredMethod):
    """Half of the prompt, by the norms of its keys."""

    def score(self, keys, values, attention):
        """Return the negative norm."""
        return -keys.norm(dim=-1)
