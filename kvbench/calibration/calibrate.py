"""Calibration of a model on a text: KVQuant's outlier thresholds and codebooks for every layer.

They are fitted to the keys (before RoPE) and values on the text, with squared gradients of the loss as weights.

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

from kvbench.calibration import file
from kvbench.calibration.fit import SideFit, fit_keys, fit_values
from kvbench.errors import ConfigError, DataError, ModelError
from kvbench.models.layers import attending
from kvbench.models.projections import ProjectionSource, attentions, head_dim, key_source, kv_heads, value_source
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


#: bytes of activations and gradients held at a time; if layers need more, the text is read several times
MEMORY = 8 << 30


def calibrate(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    name: str,
    bits: Sequence[int] = (2, 3, 4),
    outliers: float = 0.01,
    fisher: bool = True,
    first_tokens: int = 0,
    text_sha256: str = "",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> file.Calibration:
    """Compute KVQuant's outlier thresholds and codebooks for every layer of a model.

    Args:
        sequences: token ids of S sequences, ``[S, L]`` (the authors use 16 sequences of 2048 tokens of WikiText-2's
            training text).
        name: recorded in the result, as is `text_sha256`.
        bits: sizes of codes, 2 to 4; one codebook is computed for each.
        outliers: fraction of the elements that KVQuant stores in full precision.
        fisher: True to weight quantization errors by squared gradients (Fisher information), False to weight all errors
            equally.
        first_tokens: number of tokens at the start of each sequence that the codebooks are not fitted to, because
            KVQuant will keep them in full precision.
        tell: function called after the pass over each sequence, with the number of passes done and their total. If
            memory is too small for all layers at once, a sequence takes several passes.

    Raises:
        ConfigError: `bits`, `outliers` or `first_tokens` is out of range.
        ModelError: the model's keys before RoPE cannot be read, or an activation or gradient is not finite.
    """
    if not bits or not set(bits) <= {2, 3, 4}:
        raise ConfigError("--bits", ",".join(map(str, bits)), "a codebook must have 2, 3 or 4 bits", allowed="2,3,4")
    if not 0 <= outliers < 1:
        raise ConfigError(
            "--outliers", outliers, "is not a valid share of the elements", allowed="0 to below 1, such as 0.01"
        )
    count, length = sequences.shape
    if first_tokens >= length:
        raise ConfigError("--first-tokens", first_tokens, f"leaves no tokens, because sequences have {length} tokens")
    layers = len(attending(model.config))
    width = kv_heads(model) * head_dim(model)
    together = max(MEMORY // (sequences.numel() * width * 4 * (4 if fisher else 2)), 1)
    groups = [range(i, min(i + together, layers)) for i in range(0, layers, together)]
    skip = (torch.arange(length) < first_tokens).repeat(count) if first_tokens else None
    tensors, done = file.probe(model), 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(done, len(groups) * count)

    for group in groups:
        for layer, sides in collect(model, sequences, group, fisher=fisher, tell=step).items():
            for side, collected, fit in zip(("key", "value"), sides, (fit_keys, fit_values), strict=True):
                tensors |= _named_tensors(layer, side, fit(*collected.joined(), sorted(bits), outliers, skip))
    info = {
        "format": file.FORMAT,
        "model": name,
        "bits": ",".join(map(str, sorted(bits))),
        "outliers": repr(float(outliers)),
        "layers": str(layers),
        "kv_heads": str(kv_heads(model)),
        "head_dim": str(head_dim(model)),
        "fisher": str(fisher).lower(),
        "first_tokens": str(first_tokens),
        "sequences": str(count),
        "tokens": str(sequences.numel()),
        "text_sha256": text_sha256,
        "dtype": str(model.dtype).removeprefix("torch."),
        **file.versions(),
    }
    return file.Calibration(info, tensors)


def _named_tensors(layer: int, side: str, fit: SideFit) -> dict[str, Tensor]:
    named = {} if fit.thresholds is None else {f"layers.{layer}.{side}.thresholds": fit.thresholds}
    for width, book in fit.codebooks.items():
        named[f"layers.{layer}.{side}.levels.{width}"] = book.levels
        named[f"layers.{layer}.{side}.norm.{width}"] = torch.tensor(book.norm, dtype=torch.float32)
    return named


def cut_sequences(ids: Sequence[int], count: int, length: int, name: str = "the text") -> Tensor:
    """Return sequences of equal length from a text, evenly spread over it and without overlap, ``[count, length]``.

    Raises:
        DataError: the text is too short.
    """
    if len(ids) < count * length:
        raise DataError(
            f"{name} has {len(ids)} tokens; {count} sequences of {length} tokens need {count * length}.\n"
            f"  hint: provide more text, or use --sequences {max(len(ids) // length, 1)}"
            + (f" --length {len(ids)}" if len(ids) < length else "")
        )
    space = (len(ids) - length) / max(count - 1, 1)
    return torch.tensor([ids[int(i * space) : int(i * space) + length] for i in range(count)])
