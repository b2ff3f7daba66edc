"""A long prompt's feed-forward layers a slice of tokens at a time.

A gated feed-forward layer holds three tensors of ``tokens x intermediate size``: 8.6 GB for 128k tokens of a 7B Llama,
where the layer's input takes 1.1. Its tokens do not see each other, so slices give the same and hold no more than their
own share; each is still a large matrix product (from some thousand tokens on, products are bound by arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: tokens of a forward pass, rows times columns, from which on ``auto`` makes slices
LONG = 16384
#: tokens of a slice where the user names none
SLICE = 8192
#: names of what routes tokens between experts: such layers are left as they are
ROUTED = ("expert", "router", "moe")

_chosen: list[int | Literal["auto"] | None] = ["auto"]


def choose(tokens: int | Literal["auto"] | None) -> None:
    """Let this process make slices of so many tokens; ``auto``: of 8192, in prompts of more than 16384; None: none."""
    _chosen[0] = tokens


@contextmanager
def sliced(model: PreTrainedModel, tokens: int) -> Iterator[int]:
    """Within it the feed-forward layers of `model` work on slices, if a pass of `tokens` is long enough.

    Args:
        model: its modules named ``mlp`` are meant, those that are made of linear layers alone.
        tokens: rows times columns of the passes to come.

    Gives:
        how many modules are sliced.
    """
    chosen = _chosen[0]
    size = SLICE if chosen == "auto" else chosen
    if size is None or tokens <= (LONG if chosen == "auto" else size):
        yield 0
        return
    found = [each for name, each in model.named_modules() if name.rpartition(".")[2] == "mlp" and plain(each)]
    before = [each.__dict__.get("forward") for each in found]
    try:
        for each in found:
            each.forward = _by_slices(each.forward, size)  # type: ignore[method-assign]
        yield len(found)
    finally:
        for each, forward in zip(found, before, strict=True):
            if forward is None:
                each.__dict__.pop("forward", None)
            else:  # others wrap modules in the same way (accelerate's hooks)
                each.forward = forward  # type: ignore[method-assign]


def plain(module: nn.Module) -> bool:
    """Whether a module is a feed-forward layer, whose tokens do not see each other: linear layers and activations."""
    for name, each in module.named_modules():
        if any(word in part for word in ROUTED for part in (name.lower(), type(each).__name__.lower())):
            return False
        linear = hasattr(each, "in_features") and hasattr(each, "out_features")
        own = any(True for _ in each.parameters(recurse=False)) or any(True for _ in each.buffers(recurse=False))
        if own and not linear:
            return False
    return True


def _by_slices(forward: Callable[..., Any], size: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if len(args) != 1 or kwargs or not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] * x.shape[1] <= size:
            return forward(*args, **kwargs)
        columns = max(size // x.shape[0], 1)
        first = forward(x[:, :columns])
        if not isinstance(first, Tensor) or first.shape[:2] != x[:, :columns].shape[:2]:
            return forward(x)
        out = torch.empty(*x.shape[:2], first.shape[-1], dtype=first.dtype, device=first.device)
        out[:, :columns] = first
        del first
        for start in range(columns, x.shape[1], columns):
            out[:, start : start + columns] = forward(x[:, start : start + columns])
        return out

    return run
