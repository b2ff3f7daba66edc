"""Parts that the evicting methods share: budgets, the choice of the highest scores, and positions of what stays."""

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

#: reduction of the scores of the query heads that share a KV head
Reduce = Literal["mean", "max", "sum"]


def tokens(budget: int | float, n: int, least: int) -> int:
    """Return the tokens that a budget allows of n: a number as it is, a share of n rounded down; at least `least`."""
    # 1e-9: 0.29 * 100 is 28.999999999999996
    count = budget if isinstance(budget, int) else int(budget * n + 1e-9)
    return min(max(count, least), n)


def check_budget(budget: int | float, least: int, what: str, key: str = "method.budget") -> None:
    """Raise ConfigError for a share outside (0, 1], or a number below `least`, which `what` explains."""
    if isinstance(budget, float) and not 0.0 < budget <= 1.0:
        raise ConfigError(
            key, budget, "is not a share of the context", allowed="0.25, ..., or a whole number of tokens"
        )
    if isinstance(budget, int) and budget < least:
        raise ConfigError(key, budget, f"must hold {what}", allowed=f"{least}, ..., or a share such as 0.25")


def reduce(scores: torch.Tensor, how: Reduce, dim: int) -> torch.Tensor:
    """Return one score for each group of query heads (dimension `dim`)."""
    if how == "max":
        return scores.amax(dim)
    return scores.mean(dim) if how == "mean" else scores.sum(dim)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the `count` highest scores ``[..., n]``, in ascending order; of equal ones the earlier.

    Max pooling makes equal neighbours: a rule for them gives every device the same choice, which ``topk`` does not.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def with_recent(chosen: torch.Tensor, n: int, recent: int) -> torch.Tensor:
    """Return the `chosen` places ``[..., m]``, followed by the last `recent` of n."""
    newest = torch.arange(n - recent, n, device=chosen.device).expand(*chosen.shape[:-1], recent)
    return torch.cat([chosen, newest], -1)


def put(layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None) -> None:
    """Place the prompt tokens of `index` ``[rows, H, m]``, or all of them, and note their positions."""
    if index is not None:
        places = index.cpu()
        for number, row in enumerate(range(*rows.indices(layer.batch))):
            layer.order[row] = places[number] + layer.seen - keys.shape[2]  # a sliding window may have passed some
    for store, x in zip(layer.stores(), (keys, values), strict=True):
        chosen = x if index is None else x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))
        store.tail.append(rows, chosen)


def keep(layer: KVLayer, rows: slice, index: torch.Tensor) -> None:
    """Drop all slots of `rows` but those of `index` ``[rows, H, m]`` from both stores, and note their positions."""
    places = index.cpu()
    for number, row in enumerate(range(*rows.indices(layer.batch))):
        positions = layer.positions(row)
        layer.order[row] = positions.expand(layer.heads, -1).gather(-1, places[number])
    for store in layer.stores():
        store.tail.keep(rows, index)


def forget(layer: KVLayer, rows: slice, hidden: int) -> None:
    """Drop the oldest slots of which every head's token is hidden, 32 positions at a time, and note the positions."""
    for row in range(*rows.indices(layer.batch)):
        count = layer.hidden_slots(row, whole(hidden, CHUNK))
        if count:
            positions = layer.positions(row)
            layer.order[row] = positions[..., count:].clone()
            for store in layer.stores():
                store.drop_front(slice(row, row + 1), count)
