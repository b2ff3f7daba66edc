"""Error messages for NaN and Inf in the cache: which layer, key or value, and which position."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.progress import Progress
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.cache.store import Store
from kvbench.cache.watch import Place
from kvbench.errors import NonFiniteError

#: what to do, by the range of the cache's dtype: that of fp16 is small, those of bf16 and fp32 are large
NARROW = "\n  hint: load the model with a dtype of larger range: model.dtype=bfloat16 or model.dtype=float32"
WIDE = "\n  hint: download the weights again, since they may be damaged"


class _Holder(Protocol):
    """Part of :class:`kvbench.cache.layer.KVLayer` that this module needs; an import of the class would be circular."""

    index: int
    batch: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    progress: Progress
    keys_store: Store | None

    def stores(self) -> tuple[Store, Store]: ...

    def positions(self, row: int) -> Tensor: ...


def watch_segments(layer: _Holder) -> None:
    """Prepare a layer so that an error about a NaN or Inf in packed tokens names layer, position, head and channel.

    Each packed segment of the layer, newly created, is registered with the device's :class:`Watch`, into which kernels
    write the location of the first NaN or Inf. Does nothing on a CPU, where packing raises the error at once.
    """
    if layer.device.type != "cuda":
        return
    watch = layer.progress.watches.of(layer.device)
    watch.fresh = True
    for side, store in zip(("key", "value"), layer.stores(), strict=True):
        for number, segment in enumerate(store.segments):
            if isinstance(segment, (PackedSegment, NuqSegment)):
                tag = watch.tag(partial(nonfinite_message, weakref.ref(layer), layer.index, side, number))
                segment.watch = (watch, tag)


def nonfinite_message(owner: weakref.ref[_Holder], index: int, side: str, number: int, place: Place) -> str:
    """Return the error message for a NaN or Inf that was packed into segment `number` of a layer's store.

    The message omits the position if the layer (`owner`) no longer exists or no longer holds the token.
    """
    layer, position = owner(), ""
    if layer is not None:
        store = layer.stores()[side == "value"]
        slot = sum(store.signature(place.row)[:number]) + place.token
        positions = layer.positions(place.row)
        if slot < positions.shape[-1]:
            position = f" at position {int(positions.expand(layer.heads, -1)[place.head, slot])}"
    return (
        f"layer {index}: NaN or Inf in the {side}{position} (row {place.row}, KV head {place.head}, "
        f"channel {place.channel}).{_hint(layer)}"
    )


def located_in_tails(layer: _Holder, error: NonFiniteError, rows: slice) -> NonFiniteError:
    """Return an error that names the layer and the position of a NaN or Inf, in place of `error`, which packing raised.

    As packing failed, the tokens are still in the full-precision tails, where the NaN or Inf is looked for. If all of
    them are finite, `error` itself is returned.
    """
    stores, first = layer.stores(), rows.indices(layer.batch)[0]
    try:
        for side, store in enumerate(stores):
            tail = store.tail.view(rows)
            if not bool(torch.isfinite(tail).all()):
                # one side may be settled already: the positions are still those of the side that is not
                layer.keys_store = max(stores, key=lambda s: s.tail.length(rows))
                newest = layer.positions(first)[..., -tail.shape[2] :]
                both = [tail[:, :, :0], tail[:, :, :0]]
                both[side] = tail
                return located(layer, error, rows, both[0], both[1], newest)
    finally:
        layer.keys_store = stores[0]
    return error


def located(
    layer: _Holder, error: NonFiniteError, rows: slice, keys: Tensor, values: Tensor, positions: Tensor
) -> NonFiniteError:
    """Return an error that names the layer and position of the first NaN or Inf in given keys and values.

    Keys are ``[rows, H, n, D]``, values ``[rows, H, n, Dv]``, positions ``[n]`` or ``[H, n]``. If all elements are
    finite, `error` itself is returned.
    """
    for side, x in (("key", keys), ("value", values)):
        bad = ~torch.isfinite(x)
        if bool(bad.any()):
            b, h, t, d = bad.nonzero()[0].tolist()
            if x.shape[0] != layer.batch:
                b += rows.indices(layer.batch)[0]
            position = int(positions.expand(layer.heads, -1)[h, t])
            return NonFiniteError(
                f"layer {layer.index}: NaN or Inf in the {side} at position {position} (row {b}, KV head {h}, "
                f"channel {d}).{_hint(layer)}"
            )
    return error


def _hint(layer: _Holder | None) -> str:
    if layer is None:
        return ""
    return NARROW if layer.dtype == torch.float16 else WIDE
