"""Feed-forward layers and RoPE of a long prompt, computed one slice of tokens at a time to save memory.

A gated feed-forward layer needs three tensors of ``tokens x intermediate size``: 8.6 GB for 128k tokens of a 7B Llama,
while the layer's input takes 1.1 GB. Its tokens are independent of each other, so slices give the same result with the
memory of one slice. They are not slower, since products over a few thousand tokens are already limited by arithmetic.
RoPE needs the next largest amount: transformers computes it with three tensors of the size of queries or keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: number of tokens of a forward pass, rows times columns, above which ``auto`` makes slices
LONG = 16384
#: default number of tokens of a slice
SLICE = 8192
#: name of the function that rotates queries and keys in transformers' model files
ROPE = "apply_rotary_pos_emb"
#: parts of names by which mixture-of-experts layers are recognised; they are not sliced
ROUTED = ("expert", "router", "moe")


@contextmanager
def sliced(model: PreTrainedModel, tokens: int, chunk: int | Literal["auto"] | None = "auto") -> Iterator[int]:
    """Make feed-forward layers and RoPE process long inputs in slices of tokens, inside a ``with`` block.

    This saves memory. It affects the modules named ``mlp`` that consist of linear layers and activations only, and the
    function ``apply_rotary_pos_emb`` in each Python module that defines a class of the model.

    Args:
        tokens: number of tokens in a forward pass inside the block, rows times columns.
        chunk: tokens per slice; ``auto``: :data:`SLICE` if a pass has more than :data:`LONG` tokens, else no slices;
            None: no slices.

    Yields:
        The number of feed-forward modules that process slices.
    """
    size = SLICE if chunk == "auto" else chunk
    if size is None or tokens <= (LONG if chunk == "auto" else size):
        yield 0
        return
    modules = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "mlp" and treats_tokens_alone(module)
    ]
    before = [module.__dict__.get("forward") for module in modules]
    rotations = {file: getattr(file, ROPE) for file in model_modules(model) if callable(getattr(file, ROPE, None))}
    try:
        for file, rotate in rotations.items():
            setattr(file, ROPE, _rotated_by_slices(rotate, size))
        for module in modules:
            module.forward = _by_slices(module.forward, size)  # type: ignore[method-assign]
        yield len(modules)
    finally:
        for file, rotate in rotations.items():
            setattr(file, ROPE, rotate)
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:  # another tool had replaced it in the same way (accelerate's hooks)
                module.forward = forward  # type: ignore[method-assign]


def model_modules(model: nn.Module) -> set[ModuleType]:
    """Return the Python modules that define the classes of a model and of all its submodules."""
    names = {type(module).__module__ for module in model.modules()}
    return {sys.modules[name] for name in names if name in sys.modules}


def treats_tokens_alone(module: nn.Module) -> bool:
    """Return True if a module can process its tokens in slices, because it treats each token independently.

    Such a module consists of linear layers and activations only. Mixture-of-experts layers are excluded.
    """
    for name, child in module.named_modules():
        if any(word in part for word in ROUTED for part in (name.lower(), type(child).__name__.lower())):
            return False
        linear = hasattr(child, "in_features") and hasattr(child, "out_features")
        own = any(True for _ in child.parameters(recurse=False)) or any(True for _ in child.buffers(recurse=False))
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


def _rotated_by_slices(rotate: Callable[..., Any], size: int) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = q.shape[2] if q.ndim == 4 else 0
        # cos and sin must be [B or 1, tokens, D]; other layouts are computed at once
        alike = q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3 and tokens == k.shape[2] == cos.shape[1]
        if args or kwargs or not alike or q.shape[0] * tokens <= size:
            return rotate(q, k, cos, sin, *args, **kwargs)
        columns, outs = max(size // q.shape[0], 1), (torch.empty_like(q), torch.empty_like(k))
        for start in range(0, tokens, columns):
            part = slice(start, start + columns)
            for out, new in zip(outs, rotate(q[:, :, part], k[:, :, part], cos[:, part], sin[:, part]), strict=True):
                out[:, :, part] = new
        return outs

    return run
