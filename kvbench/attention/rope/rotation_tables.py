"""Cosines and sines of a model's RoPE as two small tables, for kernels that rotate keys themselves.

A position is ``128 a + b``: the angles of all positions are sums of those of 128 a and those of b. The tables are read
off the model's own rotation, and a rotation that they do not reproduce is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import upload
from kvbench.cache.layer import KVLayer

#: number of positions of the fine table
FINE = 128
#: largest difference between a key that the model rotates and one that the tables rotate, relative to the largest key
TOLERANCE = 2e-3


class NotServed(Exception):
    """Error raised if no kernel can compute the attention of a layer. Its message is the reason, which results show."""


@dataclass
class Rope:
    """The rotation that a kernel has to apply to keys that are stored before RoPE.

    Args:
        starts: RoPE position of the first slot of each row, int32 ``[B]``; slot s of row b has ``starts[b] + s``.
        fine: cosines, then sines, of the positions 0 to 127, fp32 ``[128, D]``.
        coarse: the same of the positions 0, 128, 256, ..., fp32 ``[n, D]``.
    """

    starts: Tensor
    fine: Tensor
    coarse: Tensor


#: the tables of each model's rotation, by device and channels
_known: WeakKeyDictionary[object, dict[tuple[torch.device, int], tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def rope_of(layer: KVLayer, room: int) -> Rope:
    """Return the rotation of a layer that holds pre-RoPE keys.

    Args:
        room: number of slots per row for which the tables must suffice.

    Raises:
        NotServed: the positions of a row are not consecutive, or the model's RoPE is not of the usual kind (first half
            of the channels with the second half).
    """
    starts = []
    for row in range(layer.batch):
        runs = layer.progress.positions.runs[row] if layer.progress.positions.runs else []
        if layer.method.positions(layer, row) is not None or len(runs) != 1:
            raise NotServed("the cache holds pre-RoPE keys whose positions are not consecutive")
        column, position = runs[0]
        starts.append(layer.first(row) + position - column)
    if min(starts) < 0:
        raise NotServed("the cache holds pre-RoPE keys whose positions are not consecutive")
    assert layer.rope is not None
    fine, coarse = rotation_tables(layer.rope, layer.key_dim, layer.device, max(starts) + room)
    key = (layer.device, "starts", tuple(starts))
    known = layer.progress.tables
    if key not in known:
        known[key] = upload(starts, torch.int32, layer.device)
    return Rope(known[key], fine, coarse)


def rotation_tables(
    rotation: Callable[..., Tensor], channels: int, device: torch.device, positions: int
) -> tuple[Tensor, Tensor]:
    """Return the tables of cosines and sines of a rotation, from a cache if they have been made before.

    Args:
        rotation: function that rotates keys ``[1, 1, n, D]`` for positions ``[1, n]``
            (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`).
        positions: number of positions that the tables must cover.

    Raises:
        NotServed: keys rotated by the tables differ from those that `rotation` rotates.
    """
    owner = getattr(rotation, "__self__", rotation)
    if getattr(getattr(owner, "module", None), "rope_type", "") == "longrope":
        raise NotServed("the frequencies of this model's RoPE change with the length")
    by_device = _known.setdefault(owner, {})
    key, blocks = (device, channels), -(-positions // FINE) + 1
    if key in by_device and len(by_device[key][1]) >= blocks:
        return by_device[key]
    with torch.inference_mode(False), torch.no_grad():
        fine = angles(rotation, torch.arange(FINE), channels, device)
        coarse = angles(rotation, FINE * torch.arange(blocks + blocks // 2), channels, device)
        check_tables(rotation, fine, coarse, channels, device)
    by_device[key] = (fine, coarse)
    return by_device[key]


def angles(rotation: Callable[..., Tensor], positions: Tensor, channels: int, device: torch.device) -> Tensor:
    """Return the cosines, then the sines, of a rotation at some positions, fp32 ``[n, D]``."""
    ones = torch.zeros(1, 1, len(positions), channels, device=device)
    ones[..., : channels // 2] = 1  # (1, 0) turned by an angle is (cos, sin)
    return rotation(ones, positions[None].to(device))[0, 0].float().contiguous()


def check_tables(
    rotation: Callable[..., Tensor], fine: Tensor, coarse: Tensor, channels: int, device: torch.device
) -> None:
    """Raise NotServed if the tables do not rotate keys as the model does."""
    half = channels // 2
    positions = torch.tensor([0, 1, 77, 128, FINE * (len(coarse) - 1) // 2 + 5, FINE * len(coarse) - 1])
    keys = torch.randn(1, 1, len(positions), channels, generator=torch.Generator().manual_seed(0)).to(device)
    near, far = fine[positions % FINE], coarse[positions // FINE]
    cos = far[:, :half] * near[:, :half] - far[:, half:] * near[:, half:]
    sin = far[:, half:] * near[:, :half] + far[:, :half] * near[:, half:]
    first, second = keys[..., :half], keys[..., half:]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    wanted = rotation(keys, positions[None].to(device)).float()
    if not bool(((turned - wanted).abs() <= TOLERANCE * wanted.abs().amax() * (1 + positions[-1] / 65536)).all()):
        raise NotServed("the cache holds pre-RoPE keys, and no kernel rotates them as this model does")
