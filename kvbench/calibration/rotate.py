"""Calibration of a model on a text for OSCAR: a rotation per layer and side, in two passes over the text.

The first pass sums the covariances of the queries, the second those of the values, whose weights follow from the first.
So no keys or values are held, and memory does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.calibration.attended import attended
from kvbench.calibration.covariance import query_covariance, spectrum, token_weights, value_covariance
from kvbench.calibration.heads import check_head
from kvbench.calibration.rotations import Rotations
from kvbench.calibration.stored import probe, versions
from kvbench.errors import ConfigError
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads


def rotations(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    name: str,
    per_head: bool = False,
    first_tokens: int = 0,
    text_sha256: str = "",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Rotations:
    """Compute OSCAR's rotations for every layer of a model.

    Unlike the authors' script, which leaves out the first of its dumps, this reads every token, apart from
    `first_tokens`.

    Args:
        sequences: token ids of S sequences, ``[S, L]`` (the authors use about 20,000 to 30,000 tokens).
        name: recorded in the result, as is `text_sha256`.
        per_head: True to give each KV head a rotation of its own, False to let the heads of a layer share one, made
            from the mean of their covariances.
        first_tokens: number of tokens at the start of each sequence that are left out, because the method will keep
            them in full precision.
        tell: function called after each pass over a sequence, with the number of passes done and their total.

    Raises:
        ConfigError: the number of channels per head is not a power of two, or `first_tokens` leaves no token.
        ModelError: kvbench does not support the model's attention, or a query, key or value is not finite.
    """
    count, length = sequences.shape
    heads, channels = kv_heads(model), head_dim(model)
    check_head(channels)
    if not 0 <= first_tokens < length:
        raise ConfigError("--first-tokens", first_tokens, f"leaves no tokens, because sequences have {length} tokens")
    layers = len(attending(model.config))
    keys, values = (torch.zeros(layers, heads, channels, channels, dtype=torch.float64) for _ in range(2))
    weight = torch.zeros(layers, heads, dtype=torch.float64)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(done, 2 * count)

    def queries(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        keys[layer] += query_covariance(_precise(query[first_tokens:]), heads).cpu() / count

    def weighted(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = (_precise(x[first_tokens:]) for x in (key, value))
        weights = token_weights(key, keys[layer].to(key.device))
        # a sum instead of a mean, as the weights are: the ratio of both sums over all sequences is Sigma_V
        values[layer] += value_covariance(value, weights).cpu() * len(value)
        weight[layer] += weights.sum(0).cpu()

    attended(model, sequences, queries, step)
    attended(model, sequences, weighted, step)
    values /= weight[..., None, None]
    tensors = dict(probe(model))
    for side, covariances in (("key", keys), ("value", values)):
        for layer in range(layers):
            covariance = covariances[layer] if per_head else covariances[layer].mean(0)
            tensors[f"{side}.{layer}"] = spectrum(covariance).rotation.float()
    info = {
        "format": Rotations.FORMAT,
        "model": name,
        "heads": "each" if per_head else "shared",
        "layers": str(layers),
        "kv_heads": str(heads),
        "head_dim": str(channels),
        "first_tokens": str(first_tokens),
        "sequences": str(count),
        "tokens": str(sequences.numel()),
        "text_sha256": text_sha256,
        "dtype": str(model.dtype).removeprefix("torch."),
        **versions(),
    }
    return Rotations(info, tensors)


def _precise(x: Tensor) -> Tensor:
    """Convert to fp64, on the CPU if the device (Apple's) has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()
