"""Base of methods that keep the prompt's tokens with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import Scorer, check_budget, forget_hidden, highest, put, tokens, with_recent
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
else:
    torch = lazy("torch")


@dataclass(kw_only=True)
class ScoredMethod(Scorer, Method):
    """Base of methods that drop the prompt tokens with the lowest scores, per KV head, at the end of the prefill.

    A subclass defines only :meth:`score`, which returns the scores. Everything else follows from it: the choice of
    tokens, the stores, padding, sliding windows, and the count of bytes and its formula. All generated tokens are kept.

    On a layer with a sliding window, prompt tokens that are already outside the window at the end of the prefill are
    dropped without being scored. A budget given as a share is then a share of the remaining prompt tokens. While
    decoding, stored tokens that leave the window are dropped too, generated ones included. If the heads hold different
    tokens in one slot, the slot is dropped only when the tokens of all heads have left the window, and the number of
    tokens outside the window is rounded down to a multiple of 32 for this.

    Args:
        budget: number (int) or share (float) of the prompt tokens to keep.
    """

    budget: int | float = 0.5

    prompt_only: ClassVar[bool] = True
    #: number of newest prompt tokens, part of the budget, that are kept whatever their scores; may be a field
    newest = 0

    # -- the rule ---------------------------------------------------------------------------------------------------

    def split(self, n: int) -> tuple[int, int]:
        """Return how many of `n` prompt tokens are kept for their scores, and how many because they are the newest.

        The two numbers add up to the budget, or to `n` if that is smaller.
        """
        resident = tokens(self.budget, n, self.least)
        newest = min(self.newest, resident)
        return resident - newest, newest

    @property
    def least(self) -> int:
        """Smallest allowed budget, in tokens: the newest tokens and one more."""
        return self.newest + 1

    # -- what follows from it ---------------------------------------------------------------------------------------

    @property
    def holds_codes(self) -> bool:
        """False: tokens are dropped, and those that stay are in full precision."""
        return False

    @property
    def drops_tokens(self) -> bool:
        """True: prompt tokens beyond the budget are dropped."""
        return True

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `budget` is a share outside (0, 1], or a number of tokens below :attr:`least`."""
        super().check(head_dim, max_length)
        check_budget(self.budget, self.least, f"the newest tokens ({self.newest}) and one before them")

    def reach(self) -> Reach | None:
        """Return the length of the longest prompt that is kept whole.

        If the budget is a number of tokens, the length is the budget. If the budget is a share, the length is the
        number of newest tokens that are always kept, or None if there are none.
        """
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.newest", self.newest, self.newest, of_prompt=True) if self.newest else None

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the indices of the prompt tokens to keep, ascending, ``[B, H, m]``; None: all. See :meth:`score`."""
        n = keys.shape[2]
        scored, newest = self.split(n)
        if scored + newest == n:
            return None
        scores = self.checked_scores(keys, values, attention, n - newest)
        return with_recent(highest(scores[..., : n - newest], scored), n, newest)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one empty full-precision segment, with room for the kept prompt tokens and the generated ones."""
        room = sum(self.split(layer.seen)) + layer.coming()
        return [self.full(layer, side, capacity=min(room, layer.expected_length()))]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt tokens that :meth:`choose` returns, and record their positions.

        Raises:
            CacheError, NonFiniteError: see :meth:`chosen`.
        """
        index = self.chosen(layer, keys, values, scores)
        put(layer, rows, keys, values, index)
        self.placed(layer, rows, scores, index)

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Let a subclass act once the prompt tokens `index` (as :meth:`choose` returns it) have been stored."""

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden`: each token outside the window can be dropped, because tokens are not stored in groups."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop hidden slots; a slot in which heads hold different tokens is dropped once all of these are hidden.

        In this case `hidden` is rounded down to a multiple of 32.
        """
        if layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        else:
            forget_hidden(layer, rows, hidden)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of kept and generated tokens, assuming that a sliding window hides no kept token."""
        return at.both(min(sum(self.split(at.shown)) + at.generated, at.tokens - at.hidden))
