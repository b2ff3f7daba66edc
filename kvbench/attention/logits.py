"""A softcap (Gemma-2) and sinks (gpt-oss): what some models do to attention scores beyond scaling and masking.

Both change only the softmax, so partial results can still be merged by log-sum-exp. The cap is applied to each scaled
score before masking. A sink is one more logit of a query head, without a value; it is added once to the merged sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import CacheError
from kvbench.models.layer_types import INSTEAD

#: names under which models hand the cap and the sinks to attention
SOFTCAP, SINKS = "softcap", "s_aux"


@dataclass(frozen=True, eq=False)
class Logits:
    """The softcap and the attention sinks of one layer, which change its scores or its softmax.

    Args:
        softcap: a score becomes ``softcap * tanh(score / softcap)`` (Gemma-2, arXiv 2408.00118, sec. 2). None: no cap.
        sinks: one extra logit per query head, ``[Hq]``. It takes part in the softmax and has no value (gpt-oss, arXiv
            2508.10925, sec. 2.2: "a learned bias in the denominator"). None: no sinks.
    """

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if there are neither a softcap nor sinks, so that attention is a plain softmax over the scores."""
        return self.softcap is None and self.sinks is None

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the softcap, if there is one, to scores that have been multiplied by the scaling factor."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def sinks_of(self, heads: slice) -> Logits:
        """Return the same softcap with only the sinks of some query heads."""
        return self if self.sinks is None else Logits(self.softcap, self.sinks[heads])

    def column(self, scores: Tensor) -> Tensor | None:
        """Return the sinks as one extra column of scores ``[B, Hq, q, n]``, to append before the softmax.

        Returns:
            ``[B, Hq, q, 1]`` in the dtype of `scores`; None if the model has no sinks.
        """
        if self.sinks is None:
            return None
        return self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)


PLAIN = Logits()


def logits_of(module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]) -> Logits:
    """Return the softcap and the sinks that a model passes to its attention.

    Raises:
        CacheError: the number of sinks differs from the number of query heads.
    """
    softcap, sinks = kwargs.get(SOFTCAP), kwargs.get(SINKS)
    if softcap is None and sinks is None:
        return PLAIN
    if sinks is not None:
        sinks = sinks.reshape(-1)
        if len(sinks) != query.shape[1]:
            raise CacheError(
                f"{type(module).__name__} has {len(sinks)} attention sinks for {query.shape[1]} query heads: "
                f"kvbench supports only one sink per query head.\n  hint: {INSTEAD}"
            )
    return Logits(None if softcap is None else float(softcap), sinks)


def hands_over(kind: type[nn.Module], name: str) -> bool:
    """Guess if a module passes a given keyword argument to its attention, without running the module.

    The guess is True if the name is among the constants of the byte code of the module's ``forward``.
    """
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    constants = () if code is None else code.co_consts
    return any(name == constant or (isinstance(constant, tuple) and name in constant) for constant in constants)
