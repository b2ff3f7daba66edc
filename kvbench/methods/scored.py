"""Base of methods that keep the prompt's tokens with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import CacheError
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import check_budget, forget, highest, put, tokens, with_recent

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class ScoredMethod(Method):
    """Base of methods that drop the prompt tokens with the lowest scores, per KV head, at the end of the prefill.

    A subclass states the rule as one pure function, :meth:`score`; the choice, the stores, padding, sliding windows,
    the bill and its formula follow from it. All generated tokens are kept. On a layer with a sliding window only the
    prompt tokens that later tokens can see are chosen from, and a budget that is a share is a share of them; later, a
    slot is dropped once its token is hidden in every head (32 positions at a time), generated tokens included.

    Args:
        budget: prompt tokens kept, as a number or as a share of the prompt.
    """

    budget: int | float = 0.5

    prompt_only: ClassVar[bool] = True
    #: number of newest prompt tokens, part of the budget, that are kept whatever their scores; may be a field
    newest = 0

    # -- the rule ---------------------------------------------------------------------------------------------------

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return a score per prompt token and KV head, ``[B, H, n]``; the :attr:`newest` tokens may be left out.

        Args:
            keys, values: keys and values of the prompt, ``[B, H, n, D]``.
            attention: by :attr:`observe_prompt`: 0: None; q: the attention of the last q queries, ``[B, Hq, q, n]``;
                -1: its column sums over all queries, ``[B, Hq, 1, n]``. The query heads of a KV head are adjacent.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(keys, values, attention)")

    def split(self, n: int) -> tuple[int, int]:
        """Return how many of n prompt tokens are kept for their scores, and how many as the newest."""
        resident = tokens(self.budget, n, self.least)
        newest = min(self.newest, resident)
        return resident - newest, newest

    @property
    def least(self) -> int:
        """Smallest budget, in tokens: the newest tokens and one more."""
        return self.newest + 1

    # -- what follows from it ---------------------------------------------------------------------------------------

    @property
    def drops_tokens(self) -> bool:
        """True: prompt tokens beyond the budget are dropped."""
        return True

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError for a share outside (0, 1], or a budget without room beyond the newest tokens."""
        super().check(head_dim, max_length)
        check_budget(self.budget, self.least, f"the newest tokens ({self.newest}) and one before them")

    def reach(self) -> Reach | None:
        """Return the budget if it is a number of tokens; if it is a share, only the newest tokens are sure to stay."""
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.newest", self.newest, self.newest, of_prompt=True) if self.newest else None

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the indices of the prompt tokens to keep, ascending, ``[B, H, kept]``; None if all are kept."""
        n = keys.shape[2]
        scored, newest = self.split(n)
        if scored + newest == n:
            return None
        return with_recent(highest(self.score(keys, values, attention)[..., : n - newest], scored), n, newest)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one full-precision segment, with room for the kept prompt tokens and those still to come."""
        room = sum(self.split(layer.seen)) + layer.coming()
        return [self.full(layer, side, capacity=min(room, layer.expected_length()))]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt tokens that :meth:`choose` picks, and record their positions.

        Raises:
            CacheError: the method needs the prompt's attention, and none was observed.
        """
        if self.observe_prompt and scores is None:
            raise CacheError(
                f"{type(self).__name__.lower()} chooses by the attention of the prompt, and none was observed"
            )
        index = self.choose(keys, values, scores)
        put(layer, rows, keys, values, index)
        self.placed(layer, rows, scores, index)

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Do nothing; a hook for subclasses, called once the prompt tokens `index` (None: all) have been stored."""

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden`: no groups hold tokens back."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop the hidden tokens if all tokens were kept; else the slots whose tokens are hidden in every head."""
        if layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        else:
            forget(layer, rows, hidden)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Return the bytes of kept and generated tokens; assumes that no kept token is hidden by a sliding window."""
        return at.both(min(sum(self.split(at.shown)) + at.generated, at.tokens - at.hidden))
