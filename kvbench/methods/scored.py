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
    """Base of methods that drop the prompt's tokens of lowest score, per KV head, when the prompt is complete.

    A subclass states the rule as one pure function, :meth:`score`; the choice, the stores, padding, sliding windows,
    the bill and its formula follow from it. Generated tokens all stay. On a layer with a sliding window the choice,
    and a budget that is a share, are of the prompt's tokens that are still seen; later a slot is dropped when it is
    hidden in all heads (32 positions at a time), generated tokens too.

    Args:
        budget: prompt tokens kept: a number, or a share of the prompt.
    """

    budget: int | float = 0.5

    prompt_only: ClassVar[bool] = True
    #: newest tokens of the budget, which stay whatever their score; a method may declare it as a field
    newest = 0

    # -- the rule ---------------------------------------------------------------------------------------------------

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return a score of each token, ``[B, H, n]``; those of the newest tokens may be left out.

        Args:
            keys, values: of the prompt, ``[B, H, n, D]``.
            attention: as :attr:`observe_prompt` asks: None; of the last q queries ``[B, Hq, q, n]``; or, for -1, the
                column sums over all queries ``[B, Hq, 1, n]``. Query heads of one KV head follow one another.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(keys, values, attention)")

    def split(self, n: int) -> tuple[int, int]:
        """Return how many of n tokens are kept by their score, and how many as the newest."""
        resident = tokens(self.budget, n, self.least)
        newest = min(self.newest, resident)
        return resident - newest, newest

    @property
    def least(self) -> int:
        """Smallest budget: the newest tokens and one more."""
        return self.newest + 1

    # -- what follows from it ---------------------------------------------------------------------------------------

    @property
    def drops_tokens(self) -> bool:
        """True."""
        return True

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Check that the budget is a share, or holds the newest tokens and one more."""
        super().check(head_dim, max_length)
        check_budget(self.budget, self.least, f"the newest tokens ({self.newest}) and one before them")

    def reach(self) -> Reach | None:
        """Return the budget; a share leaves only the newest tokens whole."""
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.newest", self.newest, self.newest, of_prompt=True) if self.newest else None

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the places of the tokens that stay, ascending, ``[B, H, budget]``; None: all of them."""
        n = keys.shape[2]
        scored, newest = self.split(n)
        if scored + newest == n:
            return None
        return with_recent(highest(self.score(keys, values, attention)[..., : n - newest], scored), n, newest)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one segment in full precision."""
        room = sum(self.split(layer.seen)) + layer.coming()
        return [self.full(layer, side, capacity=min(room, layer.expected_length()))]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the tokens that :meth:`choose` picks."""
        if self.observe_prompt and scores is None:
            raise CacheError(
                f"{type(self).__name__.lower()} chooses by the attention of the prompt, and none was observed"
            )
        index = self.choose(keys, values, scores)
        put(layer, rows, keys, values, index)
        self.placed(layer, rows, scores, index)

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Hook: called when tokens `index` of the prompt (None: all) have been stored."""

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return all hidden tokens."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop tokens in order of position where every head kept all; else slots that are hidden in all heads."""
        if layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        else:
            forget(layer, rows, hidden)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Return the bytes of the budget and of generated tokens; all that are kept are assumed to be seen."""
        return at.both(min(sum(self.split(at.shown)) + at.generated, at.tokens - at.hidden))
