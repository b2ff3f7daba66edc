"""Calibration of a model on a text for OSCAR: a rotation per layer and side, in two passes over the text.

The passes collect what attention reads: queries and keys after RoPE, and values. The rotations follow from the
covariances of a layer's queries and values, in fp64.

Source: Together AI, "OSCAR" (arXiv 2605.17757), and FutureMLS-Lab/OSCAR, rotation/compute_kv_rotation.py (method
``qqt_sst``, composition ``r_h_pbr``). For a KV head with queries q, keys k and values v of n tokens::

    Sigma_K = mean of q q^T over the tokens and the query heads of the KV head
    w_t     = k_t^T Sigma_K k_t
    Sigma_V = sum of w_t v_t v_t^T over the tokens / sum of w_t
    R       = U H P

U holds the eigenvectors of a covariance, H is the orthonormal Hadamard matrix, and P orders the channels such that the
eigenvalues are spread by bit reversal. Keys and queries are rotated by the R of Sigma_K, values by that of Sigma_V.

The first pass sums the covariances of the queries, the second those of the values, whose weights follow from the first.
So keys and values need not be stored, and memory does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvbench.attention import prefill
from kvbench.attention.served import check_served
from kvbench.calibration.heads import check_head
from kvbench.calibration.rotations import Rotations
from kvbench.calibration.stored import probe, versions
from kvbench.errors import ConfigError, ModelError
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads
from kvbench.rotation.named import sylvester
from kvbench.util.attachment import storage_of

NAME = "kvbench-calibration"

#: what is called for each layer and sequence: the layer, and queries, keys and values ``[n, heads, D]``
Visit = Callable[[int, Tensor, Tensor, Tensor], None]


def attended(model: PreTrainedModel, sequences: Tensor, visit: Visit, tell: Callable[[], None] = lambda: None) -> None:
    """Run a model on sequences, and pass what each layer's attention reads to `visit`.

    Args:
        sequences: token ids ``[S, L]``.
        visit: function called for each sequence and attention layer. Its arguments are the layer's index among the
            attention layers, and queries and keys after RoPE and values, ``[L, heads, D]`` each.

    Raises:
        ModelError: kvbench does not support the model's attention, or a query, key or value is NaN or Inf.
    """
    check_served(model)
    places, storage = attending(model.config), storage_of(model)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = places.index(module.layer_idx)  # type: ignore[arg-type]
        key, value = (x.to(storage).to(query.dtype) for x in (key, value))  # as a cache would get them
        for name, x in (("queries", query), ("keys", key), ("values", value)):
            if not bool(torch.isfinite(x).all()):
                raise ModelError(
                    f"{type(model).__name__}: NaN or Inf in the {name} of layer {layer} while calibrating.\n"
                    "  hint: use --dtype float32 or --dtype bfloat16"
                )
        visit(layer, *(x[0].transpose(0, 1) for x in (query, key, value)))
        return prefill.attend_prompt(module, query, key, value, attention_mask, scaling, kwargs)[0], None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            for ids in sequences.to(model.device):
                model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
                tell()
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class Spectrum:
    """The eigenvectors of covariances and the rotations made of them; all tensors may have leading dimensions.

    Args:
        covariance: the symmetric covariances, fp64 ``[..., D, D]``.
        eigenvalues: their eigenvalues in ascending order, fp64 ``[..., D]``.
        eigenvectors: U, the eigenvectors in the same order, one per column, fp64 ``[..., D, D]``.
        order: the permutation, ``[..., D]``: P is the identity matrix with its columns in this order.
        rotation: R = U H P, fp64 ``[..., D, D]``. A row vector x is rotated to x R.
    """

    covariance: Tensor
    eigenvalues: Tensor
    eigenvectors: Tensor
    order: Tensor
    rotation: Tensor


def query_covariance(queries: Tensor, heads: int) -> Tensor:
    """Return Sigma_K of each KV head, fp64 ``[H, D, D]``.

    Args:
        queries: queries after RoPE, ``[n, Hq, D]``. Query heads that share a KV head are adjacent.
    """
    grouped = queries.double().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)  # [H, n * Hq / H, D]
    return grouped.transpose(1, 2) @ grouped / grouped.shape[1]


def token_weights(keys: Tensor, covariance: Tensor) -> Tensor:
    """Return the weight of each token in Sigma_V, not normalised, fp64 ``[n, H]``."""
    keys = keys.double()
    return torch.einsum("hnd,hnd->nh", keys.transpose(0, 1) @ covariance, keys.transpose(0, 1))


def value_covariance(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of w_t v_t v_t^T over the tokens for each KV head, fp64 ``[H, D, D]``, for values ``[n, H, D]``.

    Divided by the mean of the weights it is Sigma_V.
    """
    scaled = (values.double() * weights.sqrt()[..., None]).transpose(0, 1)
    return scaled.transpose(1, 2) @ scaled / values.shape[0]


def spectrum(covariance: Tensor) -> Spectrum:
    """Return the eigenvectors, the permutation and the rotation of covariances.

    Args:
        covariance: fp64 ``[..., D, D]``, D a power of two. It need not be exactly symmetric.

    Raises:
        ConfigError: D is not a power of two.
    """
    channels = covariance.shape[-1]
    check_head(channels)
    symmetric = (covariance + covariance.mT) / 2
    eigenvalues, eigenvectors = torch.linalg.eigh(symmetric)
    descending = eigenvalues.argsort(dim=-1, descending=True, stable=True)
    order = descending[..., bit_reversal(channels)]  # an involution: order[reversal[i]] = descending[i]
    mixed = eigenvectors @ sylvester(channels) / channels**0.5
    rotation = mixed.gather(-1, order[..., None, :].expand_as(mixed))
    return Spectrum(symmetric, eigenvalues, eigenvectors, order, rotation)


def bit_reversal(count: int) -> Tensor:
    """Return the numbers from 0 to `count` - 1, each with its log2(`count`) bits in reverse order."""
    numbers, reversal = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for bit in range(count.bit_length() - 1):
        reversal |= (numbers >> bit & 1) << (count.bit_length() - 2 - bit)
    return reversal


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

    The authors' script skips the first of the activation dumps that it reads; this function uses every token, apart
    from `first_tokens`.

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
    """Convert to fp64, on the CPU if the device (Apple's) does not support fp64."""
    return (x.cpu() if x.device.type == "mps" else x).double()
