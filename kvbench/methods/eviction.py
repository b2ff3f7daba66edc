"""Functions shared by the methods that drop tokens: budgets, choice of the highest scores, positions of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.sliding import CHUNK, whole
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
else:
    torch = lazy("torch")

#: reduction of scores over the query heads that share a KV head
Reduce = Literal["mean", "max", "sum"]


def tokens(budget: int | float, n: int, least: int) -> int:
    """Return how many of `n` tokens a method with this budget keeps.

    Args:
        budget: number (int) or share (float) of tokens. A share of `n` is rounded down to a whole number.
        n: number of tokens.
        least: smallest result, unless `n` is smaller.
    """
    # 1e-9: 0.29 * 100 is 28.999999999999996
    count = budget if isinstance(budget, int) else int(budget * n + 1e-9)
    return min(max(count, least), n)


def check_budget(budget: int | float, least: int, what: str, key: str = "method.budget") -> None:
    """Raise ConfigError if a budget is a share outside (0, 1], or a number of tokens below `least`.

    Args:
        budget: number (int) or share (float) of tokens to keep.
        least: smallest number of tokens with which the method can work.
        what: what needs `least` tokens, for the message "is too small for WHAT", such as ``the newest tokens``.
        key: configuration key of the budget, for the message.
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
    """Reduce scores of query heads to scores of KV heads, by mean, maximum or sum.

    Args:
        scores: tensor of scores with a dimension for the query heads that share a KV head.
        how: ``mean``, ``max`` or ``sum``.
        dim: that dimension, which the result does not have.
    """
    if how == "max":
        return scores.amax(dim)
    return scores.mean(dim) if how == "mean" else scores.sum(dim)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` highest scores, in ascending order, ``[..., count]``.

    Of equal scores, which are common after max pooling, the one with the lower index is preferred. All devices thus
    choose the same tokens, which ``topk`` does not guarantee.

    Args:
        scores: ``[..., n]``.
        count: number of indices to return.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def with_recent(chosen: torch.Tensor, n: int, recent: int) -> torch.Tensor:
    """Append the indices of the `recent` newest tokens to those of chosen tokens.

    Args:
        chosen: indices ``[..., m]``.
        n: number of tokens.
        recent: number of newest tokens; their indices are ``n - recent`` to ``n - 1``.

    Returns:
        Indices ``[..., m + recent]``.
    """
    newest = torch.arange(n - recent, n, device=chosen.device).expand(*chosen.shape[:-1], recent)
    return torch.cat([chosen, newest], -1)


def put(layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None) -> None:
    """Store the chosen tokens of a prompt and no others, and record their positions in ``layer.order``.

    Args:
        layer: layer whose stores are empty for `rows`.
        rows: rows of the batch; their prompts are equally long.
        keys: keys of the prompt, ``[rows, H, n, D]``.
        values: values of the prompt, ``[rows, H, n, Dv]``.
        index: indices of the tokens to store for each KV head, ``[rows, H, m]``; None: all tokens.
    """
    if index is not None:
        places = index.cpu()
        for number, row in enumerate(range(*rows.indices(layer.batch))):
            layer.order[row] = places[number] + layer.seen - keys.shape[2]  # + tokens already hidden by the window
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        chosen = x if index is None else x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))
        store.tail.append(rows, chosen)


def forget(layer: KVLayer, rows: slice, hidden: int) -> None:
    """Drop tokens that a sliding window hides, and record the positions of the others in ``layer.order``.

    A slot may hold a different token in each head. The leading slots are dropped, up to the first with a token that is
    still visible.

    Args:
        layer: layer with a sliding window.
        rows: rows of the batch to change.
        hidden: number of oldest tokens that no later token can see; rounded down to a multiple of 32.
    """
    for row in range(*rows.indices(layer.batch)):
        count = layer.hidden_slots(row, whole(hidden, CHUNK))
        if count:
            positions = layer.positions(row)
            layer.order[row] = positions[..., count:].clone()
            for store in layer.stores():
                store.drop_front(slice(row, row + 1), count)
