"""Transforms by name: those of ``method.rotation``, and those that single methods use.

Sources of the signs: vLLM 0.33.0, ``int4_per_token_head.py`` (signs of one block, repeated) and ``rocm_octave.py``
(signs of the whole head); Apache-2.0. Only the rules and the seeds are theirs.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.rotation.basis import Butterfly, Transform
from kvbench.rotation.spec import SUFFIX, Side, block_of, power_of_two

#: seed of the signs in vLLM's rotated int4 cache, and in its Octave cache
SEED, OCTAVE_SEED = 0x9E3779B9, 0x5E17


def sylvester(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix of a power of two, with elements 1 and -1, fp64 ``[size, size]``."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def block_hadamard(size: int, channels: int) -> Tensor:
    """Return the matrix with a Hadamard matrix of `size` in each diagonal block, fp64 ``[channels, channels]``."""
    return torch.block_diag(*[sylvester(size)] * (channels // size))


def signs(size: int) -> Tensor:
    """Return the pseudo-random signs of vLLM's rotated int4 cache for a block, fp64 ``[size]``."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator).double() - 1


def octave_signs(channels: int) -> Tensor:
    """Return the pseudo-random signs of vLLM's Octave cache for a whole head, fp64 ``[channels]``."""
    generator = torch.Generator("cpu").manual_seed(OCTAVE_SEED)
    return (torch.randint(0, 2, (channels,), generator=generator) * -2 + 1).double()


def transform(name: str, side: Side, channels: int, device: torch.device, layer: int = 0) -> Transform | None:
    """Return the transform with this name (:class:`kvbench.rotation.spec.RotationSpec`) for heads of `channels`.

    The result is None for the name ``none``. `layer` matters only for rotations from a file. Layers with the same
    transform on the same device share its matrices.

    Raises:
        ConfigError: a file has no matrix for the layer and side, or one of another size.
    """
    if name == "none":
        return None
    if name.endswith(SUFFIX):
        return _from_file(name, Path(name).stat().st_mtime_ns, side, channels, device, layer)
    return _named_transform(name, side, channels, device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by callers outside of it
def _named_transform(name: str, side: Side, channels: int, device: torch.device) -> Transform:
    block = block_of(name, side, channels) or power_of_two(channels)
    flips: Tensor | None = None
    if name in ("rht", "rht_unnormalised"):
        flips = signs(block).repeat(channels // block)
    elif name == "octave":
        flips = octave_signs(channels)
    return butterfly_transform(block, channels, flips, 1.0 if name == "rht_unnormalised" else block**-0.5).to(device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def interleaved(name: str, channels: int, turned: int, device: torch.device) -> Transform:
    """Return the transform of keys with this name, over channels in the order in which llama.cpp holds them.

    For most models with RoPE over pairs of channels i and i + n / 2, converters to GGUF interleave the first n rows of
    the projections of queries and keys, so that a pair becomes neighbours: 0, n / 2, 1, n / 2 + 1, ...

    Args:
        name: a named rotation; ``none``: only the order changes.
        turned: n, the number of channels to which RoPE is applied.
    """
    plain = transform(name, "key", channels, device)
    matrix = torch.eye(channels, device=device) if plain is None else plain.forward
    order = torch.arange(channels)
    order[:turned] = order[:turned].view(2, -1).T.flatten()
    forward = torch.empty_like(matrix)
    forward[order.to(device)] = matrix
    return Transform.of(forward)


def butterfly_transform(block: int, channels: int, signs: Tensor | None = None, scale: float = 1.0) -> Transform:
    """Return the transform that multiplies by signs, then by Hadamard matrices of a block, then by a factor.

    Args:
        block: length of the blocks, a power of two that divides `channels`.
        signs: ``[channels]``; None for no signs.
        scale: the factor; ``block ** -0.5`` makes the transform orthogonal.
    """
    matrix = block_hadamard(block, channels)
    if signs is not None:
        matrix, signs = signs.double()[:, None] * matrix, signs.float()
    fly = Butterfly(block, scale, signs)
    return Transform((matrix * scale).float(), (matrix * fly.dual_scale).float(), fly)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _from_file(path: str, changed: int, side: Side, channels: int, device: torch.device, layer: int) -> Transform:
    key = f"{side}.{layer}"
    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"method.rotation.{side}",
            path,
            f"is not a safetensors file, or is damaged ({error})",
            hint="calibrate again, or choose a named rotation",
        ) from error
    with opened as file:
        names = list(file.keys())
        if key not in names:
            raise ConfigError(
                f"method.rotation.{side}",
                path,
                f"has no matrix '{key}'" + (f", but {len(names)} others, such as '{names[0]}'" if names else ""),
                hint="calibrate for this model",
            )
        matrix: Tensor = file.get_tensor(key)
    if matrix.shape[-2:] != (channels, channels) or matrix.ndim not in (2, 3):
        raise ConfigError(
            f"method.rotation.{side}",
            path,
            f"has a matrix '{key}' of shape {list(matrix.shape)}, but the heads have {channels} channels",
            hint="calibrate for this model",
        )
    basis: Transform | None = None
    with contextlib.suppress(torch.linalg.LinAlgError):
        basis = Transform.of(matrix)
    if basis is None or not bool(torch.isfinite(torch.stack([basis.forward, basis.dual])).all()):
        raise ConfigError(
            f"method.rotation.{side}", path, f"has a matrix '{key}' without a finite inverse", hint="calibrate again"
        )
    return basis.to(device)
