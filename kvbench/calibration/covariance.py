"""OSCAR's calibration: covariances of a layer's queries and values, and the rotations that follow from them, in fp64.

Source: Together AI, "OSCAR" (arXiv 2605.17757), and FutureMLS-Lab/OSCAR, rotation/compute_kv_rotation.py (method
``qqt_sst``, composition ``r_h_pbr``). For a KV head with queries q, keys k and values v of n tokens::

    Sigma_K = mean of q q^T over the tokens and the query heads of the KV head
    w_t     = k_t^T Sigma_K k_t
    Sigma_V = sum of w_t v_t v_t^T over the tokens / sum of w_t
    R       = U H P

U holds the eigenvectors of a covariance, H is the orthonormal Hadamard matrix, and P orders the channels such that the
eigenvalues are spread by bit reversal. Keys and queries are rotated by the R of Sigma_K, values by that of Sigma_V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.calibration.heads import check_head
from kvbench.rotation.named import sylvester


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
