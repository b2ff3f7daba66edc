"""Compilation of everything except attention in a captured step, and kvbench's kernels for its linear layers.

Linear layers with the same input are computed as one product with a joint weight: queries, keys and values, and gate
and up. The weights of the layers become views of the joint one, so it takes no additional memory. Layers may have
weights in 16 bits (:mod:`kvbench.linear.matvec`) or in 4 bits (:mod:`kvbench.linear.int4`); a layer with both uses the
latter for drafting.

At batch 1, a stock forward pass spends a third of a step in dozens of small kernels per layer: norms, RoPE,
activations. Each decoder layer is compiled separately by ``torch.compile``, with attention as one opaque operation, so
that all layers share one compilation, which takes seconds. Linear layers use kvbench's kernels if there are few rows.
Passes that draft and passes that verify are compiled separately, each with its own weights: the compiled code is used
only while a pass is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvbench.linear import int4, layout, matvec
from kvbench.linear.int4 import Int4Weight
from kvbench.models.int4 import DraftLinear, Int4Linear
from kvbench.models.load import load_model
from kvbench.profiling.memory import release
from kvbench.util.failures import is_out_of_memory
from kvbench.util.progress import say

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel
    from kvbench.models.shared import SharedRuntime
    from kvbench.models.spec import ModelConfig

#: linear layers of one module that read the same input
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Linear = nn.Linear | Int4Linear


class Product:
    """State that linear layers share if they read the same input and are computed as one matrix product.

    The first of these layers computes the product of the input with all their weights and stores it here, with the
    input. Each layer returns its slice of the product. The last layer clears the state.
    """

    # a class, as torch 2.11 compiles a list that several functions share as if each had its own
    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.out: Tensor | None = None


def products(layer: nn.Module, undo: list[Callable[[], None]], drafting: bool = False) -> None:
    """Make the linear layers of a decoder layer use kvbench's kernels for products of a few rows.

    Query, key and value projections become one product, and so do the gate and up projections. Functions that restore
    the original forward functions are appended to `undo`. With `drafting`, layers with two sets of weights use those of
    the draft.
    """
    inside = {
        id(part)
        for module in layer.modules()
        if isinstance(module, DraftLinear)
        for part in module.modules()
        if part is not module
    }
    modules = [module for module in layer.modules() if id(module) not in inside]
    for module in modules:
        for names in JOINED:
            join(module, names, undo, drafting)
    for module in modules:
        linear = joinable_linear(module, drafting)
        if linear is not None:
            bias = None if linear.bias is None else linear.bias.detach()
            undo.append(replaced(module, slice_forward(weight(linear), bias, 0, linear.out_features, Product())))


def joinable_linear(module: Any, drafting: bool) -> Linear | None:
    """Return the linear layer whose weights a module is to use; None if the module must keep its forward function.

    A linear layer can be replaced if its class is ``nn.Linear`` or :class:`Int4Linear` itself, if its forward function
    has not been replaced before, and if its weight and bias are ordinary tensors (not, for example, distributed over
    processes).
    """
    if "forward" in getattr(module, "__dict__", {}):
        return None
    if type(module) is DraftLinear:
        return joinable_linear(module.draft if drafting else module.exact, drafting)
    if type(module) is Int4Linear:
        return module
    if type(module) is not nn.Linear or type(module.weight.data) is not Tensor:
        return None
    return module if module.bias is None or type(module.bias.data) is Tensor else None


def weight(linear: Linear) -> Tensor | Int4Weight:
    """Return the weights of a linear layer."""
    return linear.int4 if isinstance(linear, Int4Linear) else linear.weight.detach()


def join(module: nn.Module, names: Sequence[str], undo: list[Callable[[], None]], drafting: bool = False) -> None:
    """Compute several linear layers of a module, which read the same input, as one matrix product.

    The weights of the layers become views of one buffer. The layer that is called first computes the whole product; the
    others only return their slices. Nothing may therefore modify the shared input between these calls.

    Nothing is changed unless they can be joined (:func:`joinable_linears`). `undo` and `drafting` are those of
    :func:`products`.
    """
    members = [getattr(module, name, None) for name in names]
    linears = joinable_linears(module, names, drafting)
    if not linears:
        return
    biases, whole = [linear.bias for linear in linears], joined_weight(linears)
    first, product = 0, Product()
    bias = None if biases[0] is None else torch.cat([one.detach() for one in biases if one is not None])
    for member, linear in zip(members, linears, strict=True):
        assert member is not None
        undo.append(replaced(member, slice_forward(whole, bias, first, first + linear.out_features, product)))
        first += linear.out_features


def joinable_linears(module: nn.Module, names: Sequence[str], drafting: bool = False) -> list[Linear]:
    """Return the linear layers of a module that can be computed as one matrix product; an empty list if they cannot.

    They can if all of them can be replaced (:func:`joinable_linear`) and have the same input size, format and device,
    all or none of them have a bias, and the module calls them in the order of `names`. The output channels of 4-bit
    weights must fill whole tiles.
    """
    members = [getattr(module, name, None) for name in names]
    linears = [linear for member in members if (linear := joinable_linear(member, drafting)) is not None]
    if len(linears) < len(names) or order_of_calls(module, names) != list(names):
        return []
    if len({joining_form(linear) for linear in linears}) > 1 or len({one.bias is None for one in linears}) > 1:
        return []
    if any(isinstance(linear, Int4Linear) and linear.out_features % layout.ROWS for linear in linears):
        return []
    return linears


def joining_form(linear: Linear) -> tuple[Any, ...]:
    """Return what linear layers must have in common to be joined: input size, format and device."""
    if isinstance(linear, Int4Linear):
        return linear.in_features, linear.int4.group, linear.int4.dtype, linear.int4.codes.device
    return linear.in_features, linear.weight.dtype, linear.weight.device, type(linear.weight)


def order_of_calls(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the `names` that occur in the code of a module's forward method, in the order of first occurrence."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return [] if code is None else [name for name in code.co_names if name in names]


def joined_weight(linears: Sequence[Linear]) -> Tensor | Int4Weight:
    """Return the weights of several linear layers of one format as one matrix (:func:`joinable_linears`)."""
    four = [linear for linear in linears if isinstance(linear, Int4Linear)]
    return whole_int4(four) if four else whole_weight([one for one in linears if isinstance(one, nn.Linear)])


def whole_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of several linear layers as one matrix, ``[sum of out_features, in_features]``.

    The first call copies the weights into a new buffer and makes the weight of each layer a view of this buffer. Later
    calls return the same buffer.
    """
    weights = [linear.weight.detach() for linear in linears]
    whole = adjacent(weights)
    if whole is None:
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat(weights)
            for linear, part in zip(linears, whole.split([len(w) for w in weights]), strict=True):
                linear.weight.data = part
    return whole


def whole_int4(linears: Sequence[Int4Linear]) -> Int4Weight:
    """Return the weights of several layers with 4-bit weights as one matrix, as :func:`whole_weight` does."""
    weights = [linear.int4 for linear in linears]
    codes, groups = adjacent([w.codes for w in weights]), adjacent([w.groups for w in weights])
    first, rows = weights[0], sum(w.rows for w in weights)
    if codes is not None and groups is not None:
        return Int4Weight(codes, groups, rows, first.columns, first.group, first.dtype)
    with torch.inference_mode(False), torch.no_grad():
        whole = int4.stacked(weights)
        tiles = [len(w.codes) for w in weights]
        parts = zip(linears, whole.codes.split(tiles), whole.groups.split(tiles), strict=True)
        for linear, codes, groups in parts:
            linear.codes, linear.groups = codes, groups
    return whole


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer that the tensors fill as consecutive views along dimension 0; None if there is none."""
    first, storage = parts[0], parts[0].untyped_storage()
    begins = accumulate((part.numel() for part in parts), initial=0)
    together = all(
        part.untyped_storage().data_ptr() == storage.data_ptr()
        and part.is_contiguous()
        and part.storage_offset() == begin
        for part, begin in zip(parts, begins, strict=False)
    )
    size = (sum(len(part) for part in parts), *first.shape[1:])
    if not together or storage.nbytes() != sum(part.numel() for part in parts) * first.element_size():
        return None
    return first.as_strided(size, first.stride())


def slice_forward(
    whole: Tensor | Int4Weight, bias: Tensor | None, first: int, last: int, product: Product
) -> Callable[[Tensor], Tensor]:
    """Return a forward function for a linear layer that shares one matrix product with other layers.

    The first of these layers computes the whole product. Each layer returns the product's columns ``first`` to
    ``last - 1``, which are its own output.

    Args:
        whole: weights of all these layers as one matrix (:func:`whole_weight`, :func:`whole_int4`).
        bias: biases of all these layers as one vector; None: they have no bias.
        first: index of the first column to return; 0 for the layer that computes the product.
        product: state that all these layers share.
    """
    if isinstance(whole, Int4Weight):
        return _sliced_int4(whole, bias, first, last, product)

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
        # another input than the product's: the layer was called out of order, so it computes its own part
        elif product.out is None or product.x is not x:
            return matvec.matvec(x, whole[first:last], None if bias is None else bias[first:last])
        out = product.out
        if last == whole.shape[0]:
            product.x = product.out = None
        return out[..., first:last]

    return forward


def _sliced_int4(
    whole: Int4Weight, bias: Tensor | None, first: int, last: int, product: Product
) -> Callable[[Tensor], Tensor]:
    numbers = whole.columns, whole.group, whole.dtype == torch.float16

    def forward(
        x: Tensor,
        codes: Tensor = whole.codes,
        groups: Tensor = whole.groups,
        bias: Tensor | None = bias,
        rows: int = whole.rows,
        first: int = first,
        last: int = last,
        numbers: tuple[int, int, bool] = numbers,
        product: Product = product,
    ) -> Tensor:
        if first == 0:
            product.x, product.out = x, int4.int4_product(x, codes, groups, rows, *numbers, bias)
        elif product.out is None or product.x is not x:
            tiles = slice(first // layout.ROWS, -(-last // layout.ROWS))
            part = None if bias is None else bias[first:last]
            return int4.int4_product(x, codes[tiles], groups[tiles], last - first, *numbers, part)
        out = product.out
        if last == rows:
            product.x = product.out = None
        return out[..., first:last]

    return forward


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward function of a module, and return a function that restores the previous one."""
    had = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[assignment]

    def undo() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = had  # type: ignore[assignment]

    return undo


#: largest number of rows for which kvbench has kernels of its own
FEW = 16
#: largest number of compilations of one layer's code, such as for the batch sizes of a sweep
LIMIT = 64


@contextmanager
def around(model: Any, on: bool, rows: int, drafting: bool = False) -> Iterator[list[Callable[..., Any]]]:
    """Compile the decoder layers of a model, apart from attention, for all forward passes in a ``with`` block.

    Results are rounded at the same points as without compilation, but sums may be computed in another order.

    Yields the forward functions of the compiled layers. Keep them as long as a graph that is recorded in the block:
    the graph reads tensors that only they refer to, such as the joint bias of layers computed as one product.

    Args:
        on: True to compile; False to change nothing.
        rows: number of tokens in a pass over the whole batch. Up to :data:`FEW`, linear layers use kvbench's kernels.
        drafting: True: linear layers with two sets of weights use those of the draft.
    """
    layers = decoder_layers(model) if on else []
    if not layers:
        yield []
        return
    # torch 2.11 cannot read back from its cache on disk what it writes for functions with default arguments
    options: dict[str, Any] = {"emulate_precision_casts": True, "fx_graph_cache": False}
    undo: list[Callable[[], None]] = []
    try:
        for layer in layers:
            if rows <= FEW:
                products(layer, undo, drafting)
            undo.append(replaced(layer, torch.compile(layer.forward, dynamic=False, options=options)))
        for part in around_layers(model):
            undo.append(replaced(part, torch.compile(part.forward, dynamic=False, options=options)))
        with torch._dynamo.config.patch(recompile_limit=LIMIT, accumulated_recompile_limit=4 * LIMIT):
            yield [part.forward for part in model.modules()]
    finally:
        for restore in reversed(undo):
            restore()


def load_joined(model: ModelConfig, runtime: SharedRuntime) -> LoadedModel:
    """Load a model, with the weights of layers that compiled steps compute as one product in one buffer (:func:`join`).

    They are joined while memory is still empty: beside a cache that fills it, there is no room for a layer's copy. A
    model that several runs share also stays as it was loaded.

    Raises:
        KvbenchError: as :func:`kvbench.models.load.load_model`.
    """
    loaded = load_model(model, runtime)
    if runtime.compile and loaded.device.type == "cuda":
        try:
            join_weights(loaded.model)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            say(f"model {loaded.name}: no room to join its weights now; its first compiled step tries again")
        release(loaded.device)  # of the pieces that the weights had before
    return loaded


def join_weights(model: Any) -> None:
    """Make weights of layers that read the same input views of one buffer, in all decoder layers."""
    for layer in decoder_layers(model):
        for module in layer.modules():
            for names in JOINED:
                linears = joinable_linears(module, names)
                if linears:
                    joined_weight(linears)


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers of a model, its module list named ``layers``; an empty list if there is none."""
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def around_layers(model: Any) -> list[nn.Module]:
    """Return the modules that a decoder runs before and after its layers: the rotary embedding and the last norm.

    Compilation reduces their dozen small kernels to two. A module that a model lacks is left out, and so is
    a rotary embedding whose frequencies depend on the length of the text.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    parts = [getattr(decoder, name, None) for name in ("rotary_emb", "norm")]
    if getattr(parts[0], "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        parts = parts[1:]
    return [part for part in parts if isinstance(part, nn.Module)]
