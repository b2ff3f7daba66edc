"""Base of methods that keep the prompt's tokens with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import check_budget, forget, highest, put, tokens, with_recent
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
else:
    torch = lazy("torch")


@dataclass(kw_only=True)
class ScoredMethod(Method):
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

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return a score per prompt token and KV head, ``[B, H, n]``; tokens with high scores are kept.

        The result may omit the scores of the :attr:`newest` tokens at its end, because these tokens are always kept.

        Args:
            keys: keys of the prompt, ``[B, H, n, D]``.
            values: values of the prompt, ``[B, H, n, Dv]``.
            attention: attention probabilities of the prompt; :attr:`observe_prompt` selects which. For 0, None. For
                q > 0, those of the last q queries, ``[B, Hq, q, n]``. For -1, their sum over all queries,
                ``[B, Hq, 1, n]``. Query heads that share a KV head are adjacent.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method score(keys, values, attention)")

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
    def drops_tokens(self) -> bool:
        """True: prompt tokens beyond the budget are dropped."""
        return True

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `budget` is a share outside (0, 1], or a number of tokens below :attr:`least`."""
        super().check(head_dim, max_length)
        check_budget(self.budget, self.least, f"the newest tokens ({self.newest}) and one before them")

    def reach(self) -> Reach | None:
        """Return the length of the longest prompt of which no token is dropped.

        It is the budget if that is a number of tokens. If the budget is a share, it is the number of newest tokens that
        are always kept, or None if there are none.
        """
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.newest", self.newest, self.newest, of_prompt=True) if self.newest else None

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the indices of the prompt tokens to keep, in ascending order, ``[B, H, m]``; None to keep all.

        Arguments are those of :meth:`score`.
        """
        n = keys.shape[2]
        scored, newest = self.split(n)
        if scored + newest == n:
            return None
        scores = self._scores(keys, values, attention, n - newest)
        return with_recent(highest(scores[..., : n - newest], scored), n, newest)

    def _scores(
        self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None, least: int
    ) -> torch.Tensor:
        """Return :meth:`score`, checked: ``[B, H, m]`` with `least` <= m <= n, and no NaN."""
        name = type(self).__name__
        try:
            scores = self.score(keys, values, attention)
        except (AssertionError, AttributeError, TypeError) as error:
            reason = str(error) or "assertion failed"
            if attention is not None or self.observe_prompt or ("None" not in str(error) and str(error)):
                raise
            raise CacheError(
                f"{name}.score failed, perhaps because its attention is None ({type(error).__name__}: {reason}).\n"
                f"  hint: set observe_prompt in {name} (it is 0): q for the attention of the last q queries, -1 "
                "for column sums over all queries, for example observe_prompt: ClassVar[int] = -1"
            ) from error
        (batch, heads, n), shape = keys.shape[:3], scores.shape if isinstance(scores, torch.Tensor) else None
        if shape is None or len(shape) != 3 or shape[:2] != (batch, heads) or not least <= shape[2] <= n:
            returned = f"a {type(scores).__name__}" if shape is None else f"shape {list(shape)}"
            count = f"{n}" if least == n else f"{n} (or at least {least}, without the newest tokens)"
            raise CacheError(
                f"{name}.score returned {returned}, expected [B, H, n] = [{batch}, {heads}, {count}]: a score per KV "
                "head and prompt token.\n  hint: check the dimensions: keys are [B, H, n, D] = "
                f"{list(keys.shape)}; attention has query "
                f"heads, which must be reduced to KV heads: attention.unflatten(1, ({heads}, -1)).mean(2)"
            )
        bad = scores[..., :least].isnan()  # infinite scores have an order: always or never kept
        if bool(bad.any()):
            row, head, token = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{name}.score returned NaN for {int(bad.sum())} of {bad.numel()} scores, the first in row {row}, KV "
                f"head {head}, token {token}.\n  hint: look for 0 / 0, inf - inf, or the square root or "
                "logarithm of a negative "
                "number in score; return -inf for a token that is never kept"
            )
        return scores

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one empty full-precision segment, with room for the kept prompt tokens and the generated ones."""
        room = sum(self.split(layer.seen)) + layer.coming()
        return [self.full(layer, side, capacity=min(room, layer.expected_length()))]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt tokens that :meth:`choose` returns, and record their positions.

        Arguments are those of :meth:`Method.place`.

        Raises:
            CacheError: the method needs the attention of the prompt, but none was observed; or the result of
                :meth:`score` has the wrong shape.
            NonFiniteError: a score is NaN.
        """
        if self.observe_prompt and scores is None:
            raise CacheError(
                f"{type(self).__name__.lower()} chooses tokens by the attention of the prompt, but no "
                "attention was observed.\n"
                "  hint: create the cache with method.new_cache(model) before the model reads the prompt"
            )
        try:
            index = self.choose(keys, values, scores)
        except (CacheError, NonFiniteError) as error:
            raise type(error)(f"layer {layer.index}: {error}") from error
        put(layer, rows, keys, values, index)
        self.placed(layer, rows, scores, index)

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Let a subclass act once the kept prompt tokens have been stored. This implementation does nothing.

        Args:
            layer: layer whose prompt has been stored.
            rows: rows of the batch.
            attention: attention of the prompt, as for :meth:`score`.
            index: indices of the kept tokens for each KV head, ``[rows, H, m]``; None: all tokens.
        """

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden`: each token outside the window can be dropped, because tokens are not stored in groups."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop tokens that a sliding window hides; arguments as for :meth:`Method.forget`.

        If the heads hold different tokens in one slot, the slot is dropped once the tokens of all heads are hidden,
        where `hidden` is rounded down to a multiple of 32.
        """
        if layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        else:
            forget(layer, rows, hidden)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of kept and generated tokens, assuming that a sliding window hides no kept token.

        Arguments and result are those of :meth:`Method.layer_bytes`.
        """
        return at.both(min(sum(self.split(at.shown)) + at.generated, at.tokens - at.hidden))
