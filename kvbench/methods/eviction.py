"""Scores, budgets, choice and storage of prompt tokens, for the methods that drop tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvbench.cache.policy import Policy
from kvbench.errors import CacheError, ConfigError, NonFiniteError
from kvbench.methods.leaving import CHUNK, whole_groups
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
            CacheError: :meth:`score` failed because it got no attention, or its result has the wrong shape.
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
        """Return the result of :meth:`choose`; errors name the layer.

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


#: reduction of scores over the query heads that share a KV head
Reduce = Literal["mean", "max", "sum"]


def tokens(budget: int | float, n: int, least: int) -> int:
    """Return how many of `n` tokens a budget keeps: at least `least`, or all `n` if there are fewer.

    A budget is a number of tokens (int), or a share of `n` (float), which is rounded down.
    """
    # 1e-9: 0.29 * 100 is 28.999999999999996
    count = budget if isinstance(budget, int) else int(budget * n + 1e-9)
    return min(max(count, least), n)


def check_budget(budget: int | float, least: int, what: str, key: str = "method.budget") -> None:
    """Raise ConfigError if a budget is a share outside (0, 1], or a number of tokens below `least`.

    Args:
        what: what needs `least` tokens, for the message "is too small for WHAT", such as ``the newest tokens``.
    """
    if isinstance(budget, float) and not 0.0 < budget <= 1.0:
        raise ConfigError(
            key, budget, "is not a share between 0 and 1", allowed="a share such as 0.25, or a whole number of tokens"
        )
    if isinstance(budget, int) and budget < least:
        raise ConfigError(
            key,
            budget,
            f"is too small for {what}",
            allowed=f"a whole number, {least} or greater, or a share such as 0.25",
        )


def reduce(scores: torch.Tensor, how: Reduce, dim: int) -> torch.Tensor:
    """Reduce scores over `dim`, the query heads that share a KV head; the result lacks this dimension."""
    if how == "max":
        return scores.amax(dim)
    return scores.mean(dim) if how == "mean" else scores.sum(dim)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` highest of the scores ``[..., n]``, in ascending order, ``[..., count]``.

    Of equal scores, which are common after max pooling, the one with the lower index is preferred. All devices thus
    choose the same tokens, which ``topk`` does not guarantee.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def with_recent(chosen: torch.Tensor, n: int, recent: int) -> torch.Tensor:
    """Return the indices `chosen`, ``[..., m]``, followed by the last `recent` of `n`: ``[..., m + recent]``."""
    newest = torch.arange(n - recent, n, device=chosen.device).expand(*chosen.shape[:-1], recent)
    return torch.cat([chosen, newest], -1)


def put(layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None) -> None:
    """Store the tokens `index` (as ``choose`` returns it) of a prompt, and their positions in ``layer.order``."""
    if index is not None:
        places = index.cpu()
        for number, row in enumerate(range(*rows.indices(layer.batch))):
            layer.order[row] = places[number] + layer.seen - keys.shape[2]  # + tokens already hidden by the window
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        chosen = x if index is None else x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))
        store.tail.append(rows, chosen)


def forget_hidden(layer: KVLayer, rows: slice, hidden: int) -> None:
    """Drop tokens that a sliding window hides, and record the positions of the others in ``layer.order``.

    A slot may hold a different token in each head. The leading slots are dropped, up to the first with a token that is
    still visible. `hidden` is rounded down to a multiple of 32.
    """
    for row in range(*rows.indices(layer.batch)):
        count = layer.hidden_slots(row, whole_groups(hidden, CHUNK))
        if count:
            positions = layer.positions(row)
            layer.order[row] = positions[..., count:].clone()
            for store in layer.stores():
                store.drop_front(slice(row, row + 1), count)
