"""Scores of a prompt's tokens, by which methods choose the tokens that they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.cache.policy import Policy
from kvbench.errors import CacheError, NonFiniteError
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
else:
    torch = lazy("torch")


class Scorer(Policy["KVLayer"]):
    """Part of a method that scores the prompt's tokens; a subclass defines :meth:`score`."""

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

    def checked_scores(
        self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None, least: int
    ) -> torch.Tensor:
        """Return :meth:`score`, checked: ``[B, H, m]`` with `least` <= m <= n, and no NaN.

        `least` is the smallest number of tokens for which scores are needed.

        Raises:
            CacheError: :meth:`score` failed for want of attention, or its result has the wrong shape.
            NonFiniteError: a score is NaN.
        """
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

    def chosen(
        self, layer: KVLayer, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return what ``choose`` returns, with errors that name the layer.

        Raises:
            CacheError: the method needs the attention of the prompt, but none was observed; or the result of
                :meth:`score` has the wrong shape.
            NonFiniteError: a score is NaN.
        """
        if self.observe_prompt and attention is None:
            raise CacheError(
                f"{type(self).__name__.lower()} chooses tokens by the attention of the prompt, but no "
                "attention was observed.\n"
                "  hint: create the cache with method.new_cache(model) before the model reads the prompt"
            )
        try:
            return self.choose(keys, values, attention)
        except (CacheError, NonFiniteError) as error:
            raise type(error)(f"layer {layer.index}: {error}") from error

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the indices of the prompt tokens to keep, in ascending order, ``[B, H, m]``; None to keep all."""
        raise NotImplementedError
