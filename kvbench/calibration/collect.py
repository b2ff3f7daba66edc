"""Collection of a model's keys (before RoPE) and values on a text, with squared gradients of the loss.

The squared gradient with respect to a key or value is the diagonal of the Fisher information. KVQuant weights the
quantization error of an element by it (KVQuant, sec. 3; SqueezeAILab/KVQuant, gradients/run-fisher.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import ModelError
from kvbench.models.projections import ProjectionSource, attentions, head_dim, key_source, value_source
from kvbench.util.attachment import storage_of


@dataclass
class Collected:
    """The keys or the values of one layer on a text, and the squared gradients of the loss with respect to them.

    Both are lists of fp32 tensors on the CPU, one ``[tokens, C]`` per sequence: ``activations``, and ``weights`` for
    the squared gradients (empty if not collected).
    """

    activations: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Return the keys or values of all sequences in one tensor ``[N, C]``, and their squared gradients in another.

        The second is None if gradients were not collected.
        """
        return torch.cat(self.activations), torch.cat(self.weights) if self.weights else None


def collect(
    model: PreTrainedModel,
    sequences: Tensor,
    layers: Sequence[int],
    *,
    fisher: bool,
    tell: Callable[[], None] = lambda: None,
) -> dict[int, tuple[Collected, Collected]]:
    """Run a model on sequences and collect the keys (before RoPE) and values of some layers.

    Args:
        sequences: token ids ``[S, L]``.
        fisher: True to collect squared gradients too, with a backward pass for each sequence.

    Returns:
        For each layer index a pair: what was collected of its keys, and of its values.

    Raises:
        ModelError: keys before RoPE cannot be read, or an activation or gradient is NaN or Inf.
    """
    modules, channels, storage = attentions(model), head_dim(model), storage_of(model)
    collected = {layer: (Collected(), Collected()) for layer in layers}
    hooks = []
    for layer in layers:
        for source, side in zip(
            (key_source(model, modules[layer]), value_source(model, modules[layer])), collected[layer], strict=True
        ):
            hooks.append(source.module.register_forward_hook(_keeper(source, side, channels, fisher, storage)))
    try:
        with _frozen(model), torch.set_grad_enabled(fisher):
            for ids in sequences.to(model.device):
                if fisher:
                    _loss(model, ids[None]).backward()
                else:
                    model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
                tell()
    finally:
        for hook in hooks:
            hook.remove()
    _check_collected(model, collected)
    return collected


def _keeper(
    source: ProjectionSource, side: Collected, channels: int, fisher: bool, storage: torch.dtype
) -> Callable[..., None]:
    def flat(out: Tensor) -> Tensor:
        part = source.cut(out.detach(), channels)[0].transpose(0, 1).flatten(1)
        return part.to("cpu", torch.float32, copy=True)  # never the tensor that flows on

    def keep(module: nn.Module, inputs: object, out: Tensor) -> None:
        side.activations.append(flat(out.to(storage)))  # as a cache would get it
        if fisher:
            out.register_hook(lambda gradient: side.weights.append(flat(gradient).square_()))

    return keep


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids[0, 1:])


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Let gradients flow through the activations alone, without memory for gradients of the weights."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def begin(module: nn.Module, inputs: object, out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.requires_grad_(True)

    hook = model.get_input_embeddings().register_forward_hook(begin)
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        hook.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)


def _check_collected(model: PreTrainedModel, collected: dict[int, tuple[Collected, Collected]]) -> None:
    for layer, sides in collected.items():
        for name, side in zip(("keys", "values"), sides, strict=True):
            for what, tensors in ((name, side.activations), (f"gradients of the {name}", side.weights)):
                if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                    raise ModelError(
                        f"{type(model).__name__}: NaN or Inf in the {what} of layer {layer} while calibrating.\n"
                        "  hint: use --dtype float32 or --dtype bfloat16, or --no-fisher if only gradients are affected"
                    )
