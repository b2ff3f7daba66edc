"""Compilation of everything except attention in a step that is captured as a CUDA graph.

At batch 1, a stock forward pass spends a third of a step in dozens of small kernels per layer: norms, RoPE,
activations. Each decoder layer is compiled separately by ``torch.compile``, with attention as one opaque operation, so
that all layers share one compilation, which takes seconds. With a single row, linear layers are matrix-vector products.
In 16 bits these use a dedicated kernel (:mod:`kvbench.linear.matvec`), and layers that read the same input (queries,
keys, values; gate and up) become one product with a joint weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.linear import matvec

#: linear layers of one module that read the same input
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: largest number of compilations of one layer's code, such as for the batch sizes of a sweep
LIMIT = 64


@contextmanager
def around(model: Any, on: bool, rows: int) -> Iterator[None]:
    """Compile the decoder layers of a model, apart from attention, for all forward passes in a ``with`` block.

    Results are rounded at the same points as without compilation, but sums may be computed in another order.

    Args:
        model: causal language model.
        on: True to compile; False to change nothing.
        rows: number of tokens in a pass over the whole batch. If it is 1, linear layers use kvbench's kernel for
            matrix-vector products.
    """
    layers = decoder_layers(model) if on else []
    if not layers:
        yield
        return
    single = rows == 1
    # torch 2.11 cannot read back from its cache on disk what it writes for functions with default arguments
    options: dict[str, Any] = {"emulate_precision_casts": True, "fx_graph_cache": False}
    undo: list[Callable[[], None]] = []
    try:
        for layer in layers:
            if single:
                products(layer, undo)
            undo.append(replaced(layer, torch.compile(layer.forward, dynamic=False, options=options)))
        with torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=4 * LIMIT):
            yield
    finally:
        for restore in reversed(undo):
            restore()


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers of a Hugging Face causal language model; an empty list if they cannot be found.

    They are expected in a module list named ``layers``.
    """
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


class Product:
    """State that linear layers share if they read the same input and are computed as one matrix product.

    The first of these layers computes the product of the input with all their weights and stores it here, with the
    input. Each layer returns its slice of the product. The last layer clears the state.
    """

    # a class, as torch 2.11 compiles a list that several functions share as if each had its own
    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.out: Tensor | None = None


def products(layer: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Make the linear layers of a decoder layer use kvbench's kernel for matrix-vector products.

    Query, key and value projections become one product, and so do the gate and up projections.

    Args:
        layer: the decoder layer; the forward functions of its linear layers are replaced.
        undo: list to which this function appends functions that restore the original forward functions.
    """
    for module in list(layer.modules()):
        for names in JOINED:
            join(module, names, undo)
    for module in layer.modules():
        if isinstance(module, nn.Linear) and plain(module):
            bias = None if module.bias is None else module.bias.detach()
            undo.append(replaced(module, sliced(module.weight.detach(), bias, 0, module.out_features, Product())))


def plain(module: Any) -> bool:
    """Return True if a module is an ordinary linear layer whose forward function can safely be replaced.

    Its class must be ``nn.Linear`` itself, its forward function must not have been replaced before, and its weight and
    bias must be ordinary tensors (not, for example, distributed over processes).
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight.data) is Tensor
        and (module.bias is None or type(module.bias.data) is Tensor)
    )


def join(module: nn.Module, names: Sequence[str], undo: list[Callable[[], None]]) -> None:
    """Compute several linear layers of a module, which read the same input, as one matrix product.

    The weights of the layers become views of one buffer. The layer that is called first computes the product, and each
    of the others returns its slice of it, so nothing may modify the shared input between these calls.

    Nothing is changed unless all layers are plain (:func:`plain`) and have the same input size, dtype and device, all
    or none of them have a bias, and the module calls them in the order of `names`.

    Args:
        module: module that contains the linear layers.
        names: attribute names of the linear layers, in the order in which the module should call them.
        undo: list to which this function appends functions that restore the original forward functions.
    """
    members = [getattr(module, name, None) for name in names]
    linears: list[nn.Linear] = [one for one in members if plain(one)]  # type: ignore[misc]
    if len(linears) < len(names) or order_of_calls(module, names) != list(names):
        return
    alike = {(linear.in_features, linear.weight.dtype, linear.weight.device, type(linear.weight)) for linear in linears}
    biases = [linear.bias for linear in linears]
    if len(alike) > 1 or len({bias is None for bias in biases}) > 1:
        return
    whole, first, product = whole_weight(linears), 0, Product()
    bias = None if biases[0] is None else torch.cat([each_bias.detach() for each_bias in biases])
    for linear in linears:
        undo.append(replaced(linear, sliced(whole, bias, first, first + linear.out_features, product)))
        first += linear.out_features


def order_of_calls(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return in which order the code of a module's forward method mentions submodules.

    Args:
        module: module whose class defines the forward method.
        names: attribute names of the submodules.

    Returns:
        Those of `names` that occur in the code, in the order of their first occurrence.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return [] if code is None else [name for name in code.co_names if name in names]


def whole_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of several linear layers as one matrix, ``[sum of out_features, in_features]``.

    The first call copies the weights into a new buffer and makes the weight of each layer a view of this buffer. Later
    calls return the same buffer.
    """
    weights = [linear.weight for linear in linears]
    size, width = sum(len(w) for w in weights), weights[0].shape[1]
    first, storage = weights[0], weights[0].untyped_storage()
    begins = accumulate((w.numel() for w in weights), initial=0)
    adjacent = [
        w.untyped_storage().data_ptr() == storage.data_ptr() and w.is_contiguous() and w.storage_offset() == begin
        for w, begin in zip(weights, begins, strict=False)
    ]
    if all(adjacent) and storage.nbytes() == size * width * first.element_size():
        return first.detach().as_strided((size, width), (width, 1))
    with torch.inference_mode(False), torch.no_grad():
        whole, start = torch.cat([w.detach() for w in weights]), 0
        for linear in linears:
            linear.weight.data = whole[start : start + linear.out_features]
            start += linear.out_features
    return whole


def sliced(whole: Tensor, bias: Tensor | None, first: int, last: int, product: Product) -> Callable[[Tensor], Tensor]:
    """Return a forward function for a linear layer that shares one matrix product with other layers.

    The first of these layers computes the whole product. Each layer returns the product's columns ``first`` to
    ``last - 1``, which are its own output.

    Args:
        whole: weights of all these layers as one matrix (:func:`whole_weight`).
        bias: biases of all these layers as one vector; None: they have no bias.
        first: index of the first column to return; 0 for the layer that computes the product.
        last: one past the index of the last column to return.
        product: state that holds input and output of the product; all these layers must share one instance.
    """

    # passed as defaults, so that layers differ in arguments of the compiled code and not in the code
    def forward(
        x: Tensor,
        whole: Tensor = whole,
        bias: Tensor | None = bias,
        first: int = first,
        last: int = last,
        product: Product = product,
    ) -> Tensor:
        if first == 0:
            product.x, product.out = x, matvec.matvec(x, whole, bias)
        elif product.out is None or product.x is not x:
            return matvec.matvec(x, whole[first:last], None if bias is None else bias[first:last])
        out = product.out
        if last == whole.shape[0]:
            product.x = product.out = None
        return out[..., first:last]

    return forward


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward function of a module, and return a function that restores the previous one.

    Args:
        module: the module.
        forward: the new forward function.
    """
    had = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[assignment]

    def undo() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = had  # type: ignore[assignment]

    return undo
