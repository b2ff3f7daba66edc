"""Functions shared by the methods that drop tokens: budgets, choice of the highest scores, storage of the chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.leaving import CHUNK, whole_groups
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
else:
    torch = lazy("torch")

#: reduction of scores over the query heads that share a KV head
Reduce = Literal["mean", "max", "sum"]


def tokens(budget: int | float, n: int, least: int) -> int:
    """Return how many of `n` tokens a method keeps, at least `least`: a number (int) or a share (float) of them.

    A share is rounded down to a whole number.
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
    """Reduce scores over `dim`, the query heads that share a KV head, which the result does not have."""
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
    """Append the indices of the `recent` newest of `n` tokens to those of chosen tokens, ``[..., m + recent]``."""
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
