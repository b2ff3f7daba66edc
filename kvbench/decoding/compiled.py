"""What lies around attention in a captured step, through ``torch.compile``: norms, RoPE, activations, linear layers.

A stock forward pass spends a third of a step at batch 1 in dozens of small kernels a layer. Each decoder layer is
compiled by itself, attention being one opaque operation in it, so that all layers share one compilation of seconds.
With a single row, linear layers are matrix-vector products, which the compiler writes itself (faster than the
library's), and those that read the same input (queries, keys, values; gate and up) become one product over one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: linear layers of one module that read the same input
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: compilations of one layer's code: batch sizes of a sweep and the like
LIMIT = 64


@contextmanager
def around(model: Any, on: bool, rows: int) -> Iterator[None]:
    """Run the decoder layers of `model` compiled, for steps of `rows` tokens; nothing where not `on`.

    The numbers are rounded where the stock forward rounds them, but products may be summed in another order.
    """
    layers = decoder_layers(model) if on else []
    if not layers:
        yield
        return
    single = rows == 1
    # the cache on disk cannot read back what it writes of functions with defaults (torch 2.11)
    options: dict[str, Any] = {
        "emulate_precision_casts": True,
        "coordinate_descent_tuning": single,
        "fx_graph_cache": False,
    }
    undo: list[Callable[[], None]] = []
    try:
        for layer in layers:
            if single:
                for module in layer.modules():
                    for names in JOINED:
                        undo += join(module, names)
            undo.append(replaced(layer, torch.compile(layer.forward, dynamic=False, options=options)))
        with torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=4 * LIMIT):
            yield
    finally:
        for each in reversed(undo):
            each()


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The decoder layers of a Hugging Face causal language model; none where they are not in a list ``layers``."""
    found = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    return list(found) if isinstance(found, nn.ModuleList) else []


def join(module: nn.Module, names: Sequence[str]) -> list[Callable[[], None]]:
    """Let linear layers of `module` be slices of one product; how to undo it. The weights become views of one buffer.

    Each layer's forward pass states the whole product and takes its slice of it: the compiler computes it once. Only
    sensible while compiling, then.
    """
    found = [getattr(module, name, None) for name in names]
    # a subclass may do something else
    linears: list[nn.Linear] = [one for one in found if type(one) is nn.Linear and one.bias is None]  # type: ignore[misc]
    if len(linears) < len(names):
        return []
    if len({(each.in_features, each.weight.dtype, each.weight.device, type(each.weight)) for each in linears}) > 1:
        return []
    whole, undo, first = whole_weight(linears), [], 0
    for each in linears:
        undo.append(replaced(each, sliced(whole, first, first + each.out_features)))
        first += each.out_features
    return undo


def whole_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """One weight ``[sum of out_features, in_features]`` of which those of `linears` are views; made once."""
    weights = [each.weight for each in linears]
    size, width = sum(len(w) for w in weights), weights[0].shape[1]
    first, storage = weights[0], weights[0].untyped_storage()
    beside = [w.untyped_storage().data_ptr() == storage.data_ptr() and w.is_contiguous() for w in weights]
    if all(beside) and first.storage_offset() == 0 and storage.nbytes() == size * width * first.element_size():
        return first.detach().as_strided((size, width), (width, 1))
    with torch.inference_mode(False), torch.no_grad():
        whole, start = torch.cat([w.detach() for w in weights]), 0
        for each in linears:
            each.weight.data = whole[start : start + each.out_features]
            start += each.out_features
    return whole


def sliced(whole: Tensor, first: int, last: int) -> Callable[[Tensor], Tensor]:
    """A forward pass: the outputs ``[first, last)`` of a product with `whole`."""

    # as defaults, so that layers differ in what the compiled code is given, not in the code
    def forward(x: Tensor, whole: Tensor = whole, first: int = first, last: int = last) -> Tensor:
        return nn.functional.linear(x, whole)[..., first:last]

    return forward


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward pass; how to undo it."""
    had = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[assignment]

    def undo() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = had  # type: ignore[assignment]

    return undo
