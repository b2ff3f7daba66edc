"""Functions shared by the methods that evict: budgets, the choice of the highest scores, positions of kept tokens."""

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
    """Return how many of n tokens a budget keeps.

    An integer budget is that number of tokens; a float is a fraction of n, rounded down. The result is at least
    `least`, but never more than n.
    """
    # 1e-9: 0.29 * 100 is 28.999999999999996
    count = budget if isinstance(budget, int) else int(budget * n + 1e-9)
    return min(max(count, least), n)


def check_budget(budget: int | float, least: int, what: str, key: str = "method.budget") -> None:
    """Raise ConfigError for a share outside (0, 1], or a number of tokens below `least`.

    Args:
        budget: share of the prompt, or number of tokens, to keep.
        least: smallest number of tokens that makes sense for the method.
        what: completes the message "must hold ..." for a number that is too small.
        key: configuration key of the budget.
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
    """Return the scores reduced over dimension `dim`, the query heads of a KV head; the dimension disappears."""
    if how == "max":
        return scores.amax(dim)
    return scores.mean(dim) if how == "mean" else scores.sum(dim)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` highest scores in ``[..., n]``, in ascending order, ``[..., count]``.

    Among equal scores the earlier index wins. Max pooling produces equal neighbours, and with this rule every device
    chooses the same ones, unlike with ``topk``.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def with_recent(chosen: torch.Tensor, n: int, recent: int) -> torch.Tensor:
    """Return the `chosen` indices ``[..., m]``, followed by the last `recent` of n, ``[..., m + recent]``."""
    newest = torch.arange(n - recent, n, device=chosen.device).expand(*chosen.shape[:-1], recent)
    return torch.cat([chosen, newest], -1)


def put(layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None) -> None:
    """Store the prompt tokens `index` ``[rows, H, m]`` (None: all of them), and record their positions."""
    if index is not None:
        places = index.cpu()
        for number, row in enumerate(range(*rows.indices(layer.batch))):
            layer.order[row] = places[number] + layer.seen - keys.shape[2]  # + tokens already hidden by the window
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        chosen = x if index is None else x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))
        store.tail.append(rows, chosen)


def keep(layer: KVLayer, rows: slice, index: torch.Tensor) -> None:
    """Keep only the slots `index` ``[rows, H, m]`` of both stores, and record their positions."""
    places = index.cpu()
    for number, row in enumerate(range(*rows.indices(layer.batch))):
        positions = layer.positions(row)
        layer.order[row] = positions.expand(layer.heads, -1).gather(-1, places[number])
    for store in layer.stores():
        store.tail.keep(rows, index)


def forget(layer: KVLayer, rows: slice, hidden: int) -> None:
    """Drop the slots at the front whose tokens are hidden in every head, and record the remaining positions.

    Only whole multiples of 32 hidden positions count.
    """
    for row in range(*rows.indices(layer.batch)):
        count = layer.hidden_slots(row, whole(hidden, CHUNK))
        if count:
            positions = layer.positions(row)
            layer.order[row] = positions[..., count:].clone()
            for store in layer.stores():
                store.drop_front(slice(row, row + 1), count)
