"""Forward passes with a kvbench cache: the prompt, a step of new tokens, and the check that the model used the cache.

Feed-forward layers and RoPE of a long prompt are computed one slice of tokens at a time, to save memory.

A gated feed-forward layer needs three tensors of ``tokens x intermediate size``: 8.6 GB for 128k tokens of a 7B Llama,
while the layer's input takes 1.1 GB. Its tokens are independent of each other, so slices give the same result with the
memory of one slice. They are not slower, since products over a few thousand tokens are already limited by arithmetic.
RoPE needs the next largest amount: transformers computes it with three tensors of the size of queries or keys.

kvbench has its own loops for two reasons. Transformers' ``generate`` may replace a cache without a warning (for Phi-3
longrope beyond its original length). And it does not tell the cache which prefill chunk is the last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.errors import CacheError, NonFiniteError

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


#: number of prompts in one forward pass (:func:`prefill_groups`)
Rows = int | Literal["auto"] | None
#: number of tokens of a pass over several prompts; with more it needs more memory but is no faster
TOGETHER = 16384


def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int | None = None,
    rows: Rows = "auto",
) -> Tensor:
    """Run the model on the prompts to fill the cache, and return the logits of each prompt's last token, ``[B, V]``.

    Prompt tokens attend to keys and values in full precision, unless the method sets ``quantized_prefill``.

    Args:
        cache: an empty cache, which holds the prompts afterwards.
        input_ids: prompts ``[B, T]``, padded on the left.
        mask: attention mask ``[B, T]``; None: no padding.
        chunk: tokens per forward pass; None: the whole prompt at once.
        rows: prompts per forward pass (:func:`prefill_groups`); fewer need less memory.

    Raises:
        CacheError: the cache was used before, or the model used another cache.
        NonFiniteError: the returned logits contain NaN or +Inf, so no token can be chosen from them.
    """
    logits = _prompt(model, cache, input_ids, mask, chunk, rows)
    bad = (torch.isnan(logits) | torch.isposinf(logits)).any(-1).nonzero()
    if len(bad):
        damaged = "download the weights again, since they must be damaged"
        remedy = (
            damaged if logits.dtype == torch.float32 else f"set model.dtype=float32; if the error remains, {damaged}"
        )
        raise NonFiniteError(
            f"the model's logits after the prompt of row {int(bad[0])} contain NaN or Inf: either the model's weights "
            f"contain them too, or its activations exceed the range of {str(logits.dtype).removeprefix('torch.')}.\n"
            f"  hint: {remedy}"
        )
    return logits


def _prompt(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, mask: Tensor | None, chunk: int | None, rows: Rows
) -> Tensor:
    if cache.get_seq_length():
        raise CacheError(
            f"the cache already contains {cache.get_seq_length()} tokens of another prompt: create a "
            "new one for each prompt with "
            "method.new_cache(model), or call cache.reset(). For several questions on one text, see "
            "kvbench.decoding.questions"
        )
    batch, width = input_ids.shape
    slice_size = cache.options.mlp_chunk
    if mask is None:
        positions = torch.arange(width, device=input_ids.device).expand(batch, width)
    else:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    parts = (
        [slice(0, batch)] if chunk is not None and chunk < width else prefill_groups(cache, batch, width, mask, rows)
    )
    if len(parts) > 1:
        last_logits = []
        for part in parts:
            with cache.only(part, batch), sliced(model, (part.stop - part.start) * width, slice_size):
                own = None if mask is None else mask[part]
                last_logits.append(forward(model, cache, input_ids[part], own, positions[part])[:, -1])
        cache.finalize()
        check_cache(cache, width)
        return torch.cat(last_logits)
    chunk = chunk or width
    if chunk < width:
        cache.open_prefill()
    logits = input_ids.new_empty(0)
    with sliced(model, batch * min(chunk, width), slice_size):
        for first in range(0, width, chunk):
            last = min(first + chunk, width)
            seen = None if mask is None else mask[:, :last]
            logits = forward(model, cache, input_ids[:, first:last], seen, positions[:, first:last])
    cache.finalize()
    check_cache(cache, width)
    return logits[:, -1]


def prefill_groups(cache: KVCache, batch: int, width: int, mask: Tensor | None, rows: Rows) -> list[slice]:
    """Divide a batch into groups of prompts that are prefilled one after another; return a slice of rows for each.

    If several groups are impossible, there is only one. This is so if the cache stores keys before RoPE, if prompts
    attend to quantized keys and values, or if there is padding that was not declared when the cache was created.

    Args:
        width: columns of the padded prompts.
        rows: prompts per group; ``auto``: as many as have :data:`TOGETHER` tokens together, at least 1; None: all.
    """
    if rows == "auto":
        rows = max(1, TOGETHER // width)
    if (
        rows is None
        or rows >= batch
        or not cache.takes_groups()
        or (mask is not None and not cache.progress.prefill.prompts)
    ):
        return [slice(0, batch)]
    return [slice(first, min(first + rows, batch)) for first in range(0, batch, rows)]


def forward(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    *,
    all_logits: bool = False,
) -> Tensor:
    """Run the model on new tokens, append these to the cache, and return their logits.

    If a model with recurrent states cannot process several new tokens at once (Jamba), there is a pass per token.

    Args:
        input_ids: new tokens ``[B, q]``.
        mask: attention mask ``[B, T + q]`` of the T cached and q new columns; None: no padding.
        positions: positions of the new tokens, ``[B, q]``.
        all_logits: True: return the logits of all new tokens, ``[B, q, V]``; False: of the last one, ``[B, 1, V]``.
    """
    count = input_ids.shape[1]
    if count > 1 and cache.one_by_one:
        seen = cache.get_seq_length()
        steps = [
            forward(
                model,
                cache,
                input_ids[:, i : i + 1],
                None if mask is None else mask[:, : seen + i + 1],
                positions[:, i : i + 1],
            )
            for i in range(count)
        ]
        return torch.cat(steps if all_logits else steps[-1:], 1)
    keep = {} if all_logits else {"logits_to_keep": 1}
    return model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **keep,
    ).logits


def check_cache(cache: KVCache, expected: int) -> None:
    """Raise CacheError unless each row of the cache has received `expected` tokens, padding included.

    If the number differs, the model has used another cache.
    """
    if cache.get_seq_length() != expected:
        raise CacheError(
            f"the cache contains {cache.get_seq_length()} tokens, but {expected} went through the "
            "model, so the model used "
            "another cache and this run would not measure the method"
        )


def now(tensor: Tensor) -> float:
    """Wait for the device of a tensor to finish all work queued before this call, and return the time in seconds.

    Only differences between two such times are meaningful.
    """
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
