"""Compilation of everything except attention in a step that is captured as a CUDA graph.

At batch 1, a stock forward pass spends a third of a step in dozens of small kernels per layer: norms, RoPE,
activations. Each decoder layer is compiled separately by ``torch.compile``, with attention as one opaque operation, so
that all layers share one compilation, which takes seconds. With few rows, linear layers use kvbench's own kernels, and
those that read the same input become one product (:mod:`kvbench.decoding.joined`). Passes that draft and passes that
verify are compiled separately, each with its own weights: the compiled code is used only while a pass is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvbench.decoding.joined import products, replaced

#: largest number of rows for which kvbench has kernels of its own
FEW = 16
#: largest number of compilations of one layer's code, such as for the batch sizes of a sweep
LIMIT = 64


@contextmanager
def around(model: Any, on: bool, rows: int, drafting: bool = False) -> Iterator[list[Callable[..., Any]]]:
    """Compile the decoder layers of a model, apart from attention, for all forward passes in a ``with`` block.

    Results are rounded at the same points as without compilation, but sums may be computed in another order.

    The ``with`` block is given the forward functions. A graph that is recorded in it reads tensors that these alone
    hold, such as the joint bias of layers that are one product: they must live as long as the graph.

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


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers of a model, its module list named ``layers``; an empty list if there is none."""
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def around_layers(model: Any) -> list[nn.Module]:
    """Return what a decoder computes before and after its layers: the rotary embedding, and the last norm.

    They are a dozen small kernels, of which compilation leaves two. A module that a model lacks is left out, and so is
    a rotary embedding whose frequencies depend on the length of the text.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    parts = [getattr(decoder, name, None) for name in ("rotary_emb", "norm")]
    if getattr(parts[0], "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        parts = parts[1:]
    return [part for part in parts if isinstance(part, nn.Module)]
