"""Calibration of a model on a text: KVQuant's outlier thresholds and codebooks for every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.calibration import file
from kvbench.calibration.collect import collect
from kvbench.calibration.fit import SideFit, fit_keys, fit_values
from kvbench.errors import ConfigError, DataError
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads

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
