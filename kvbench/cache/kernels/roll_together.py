"""Windows that roll in the same step, in all layers at once: their sinks cost no launches a layer.

The host knows at once where a window begins anew (`RollingSegment.roll`); what the device
has to do for it is put off until all layers have settled. Then the sinks' keys of all layers are turned as one tensor,
and a kernel writes them over a table of addresses; where none is compiled, one copy of lists of tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvbench.cache.kernels.pack import compiled
from kvbench.cache.kernels.tables import addresses, upload

if TYPE_CHECKING:
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.rolling import RollingSegment

#: run the kernels in Triton's interpreter on a CPU (tests)
INTERPRET = False
#: elements of a program of :func:`kvbench.cache.kernels.roll_kernel.move_to_front` at a time
ELEMENTS = 8192
#: elements of keys that are turned at a time: those of 32 rows of a 7B model, in fp32 and with copies about 300 MB
TURNED = 1 << 24
#: sinks of a program of :func:`kvbench.cache.kernels.roll_kernel.write_sinks` at a time
SINKS = 8


class Move(NamedTuple):
    """What moves in rows ``[first, last)`` of a segment, alike.

    Attributes:
        old, new: where the sinks begin in the buffer, before and after.
        evicted: positions by which keys are turned.
        back: tokens, from `new` on, that go to the front of the buffer once the sinks stand before them; or 0.
    """

    first: int
    last: int
    old: int
    new: int
    evicted: int
    back: int = 0


#: a segment, and what moves in it
Roll = tuple["RollingSegment", tuple[Move, ...]]

_collecting: list[Roll] | None = None


@contextmanager
def together() -> Iterator[None]:
    """Put off what rolls inside, and do it at the end, the same of all layers at once.

    Only where nothing inside reads or writes the windows after they have rolled. Inside another one it does nothing.
    """
    global _collecting
    if _collecting is not None:
        yield
        return
    rolls = _collecting = []
    try:
        yield
    finally:
        _collecting = None
        launch(rolls)  # also after an error: the host counts with it


def putting_off() -> bool:
    """Whether rolls are put off now."""
    return _collecting is not None


def roll(segment: RollingSegment, move: Move) -> None:
    """Move the sinks of `segment`, now or, inside :func:`together`, later."""
    if segment.originals is None and move.old == move.new and not move.back:
        return
    if _collecting is None:
        launch([(segment, (move,))])
    else:
        _collecting.append((segment, (move,)))


def settle(layers: Sequence[KVLayer]) -> None:
    """Settle the layers of a cache whose method :attr:`~kvbench.methods.base.Method.rolls`.

    Layers nearly always agree: what one does is worked out once, and said again of those in the state that it was in.
    """
    with together():
        assert _collecting is not None
        known: tuple[Hashable, KVLayer, list[RollingSegment], list[tuple[Move, ...]]] | None = None
        for layer in layers:
            segments = layer.rolling()
            before = segments and (layer.seen, layer.sealed, layer.window, [segment.state() for segment in segments])
            if known is not None and before == known[0]:
                for segment, other, moves in zip(segments, known[2], known[3], strict=True):
                    segment.follow(other, moves)
                    _collecting.append((segment, moves))
                layer.firm[:] = known[1].firm
                continue
            first = len(_collecting)
            layer.settle()
            if before and known is None:
                rolled = joined(_collecting[first:])
                known = before, layer, segments, [rolled.get(id(segment), (segment, ()))[1] for segment in segments]


def joined(rolls: Sequence[Roll]) -> dict[int, Roll]:
    """All moves of each segment, by its identity."""
    found: dict[int, Roll] = {}
    for segment, moves in rolls:
        known = found.get(id(segment))
        found[id(segment)] = (segment, moves if known is None else known[1] + moves)
    return found


def launch(rolls: Sequence[Roll]) -> None:
    """Do `rolls`, those alike at once."""
    alike: dict[Hashable, tuple[tuple[Move, ...], list[RollingSegment]]] = {}
    for segment, moves in joined(rolls).values():
        if moves:
            buffer = segment.buffer
            key = (buffer.shape, buffer.dtype, buffer.device, segment.sinks, segment.turn, moves)
            alike.setdefault(key, (moves, []))[1].append(segment)
    for moves, segments in alike.values():
        run(segments, moves)


def run(segments: Sequence[RollingSegment], moves: tuple[Move, ...]) -> None:
    """The same moves of segments of one shape."""
    keys = segments[0].originals
    most = len(segments) if keys is None else max(TURNED // keys.numel(), 1)
    do = by_kernel if INTERPRET or compiled(segments[0].buffer.device) else by_torch
    for first in range(0, len(segments), most):
        some = segments[first : first + most]
        do(some, moves, None if keys is None else turn(some, moves))


def turn(segments: Sequence[RollingSegment], moves: Sequence[Move]) -> Tensor:
    """The sinks' keys of all segments ``[B, segments x H, sinks, D]``, turned as the moves say.

    Rows that do not move are turned by any number, and must not be used.
    """
    keys = [segment.originals for segment in segments if segment.originals is not None]
    x = keys[0] if len(keys) == 1 else torch.cat(keys, 1)
    assert segments[0].turn is not None
    if all(move.evicted == moves[0].evicted for move in moves):
        return segments[0].turn(x, moves[0].evicted)
    by = [0] * len(x)
    for move in moves:
        by[move.first : move.last] = [move.evicted] * (move.last - move.first)
    return segments[0].turn(x, by)


def by_torch(segments: Sequence[RollingSegment], moves: Sequence[Move], turned: Tensor | None) -> None:
    """In plain torch."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for move in moves:
        rows, count = slice(move.first, move.last), segments[0].sinks
        for segment in segments:
            targets.append(segment.buffer[rows, :, move.new : move.new + count])
        if turned is not None:
            joint = turned[rows]
        else:  # a copy of all: old and new places overlap
            joint = torch.cat([segment.buffer[rows, :, move.old : move.old + count] for segment in segments], 1)
        sources.extend(joint.chunk(len(segments), 1))
    torch._foreach_copy_(targets, sources)
    for move in moves:
        for segment in segments if move.back else ():
            live = segment.buffer[move.first : move.last, :, move.new : move.new + move.back]
            segment.buffer[move.first : move.last, :, : move.back].copy_(live.clone() if move.new < move.back else live)


def by_kernel(segments: Sequence[RollingSegment], moves: tuple[Move, ...], turned: Tensor | None) -> None:
    """One launch for the sinks, and one for what goes to the front of its buffer."""
    import triton

    from kvbench.cache.kernels.roll_kernel import move_to_front, write_sinks

    buffer, sinks = segments[0].buffer, segments[0].sinks
    rows, heads, room, channels = buffer.shape
    block = triton.next_power_of_2(channels)
    where = places(moves, rows, buffer.device)
    held = addresses(tuple(segment.buffer.data_ptr() for segment in segments), buffer.device)
    grid = (rows * heads, len(segments))
    with torch.cuda.device_of(buffer):
        write_sinks[grid](
            held,
            buffer if turned is None else turned.contiguous(),
            where,
            heads,
            room,
            sinks,
            turned is not None,
            channels,
            block,
            min(SINKS, triton.next_power_of_2(sinks)),
            num_stages=1,
        )
        if any(move.back for move in moves):
            tokens = max(ELEMENTS // block, 1)
            move_to_front[grid](held, buffer, where, heads, room, channels, block, tokens, num_stages=1)


def warm(segment: RollingSegment) -> None:
    """Have the kernels compiled by which `segment` rolls later; nothing moves now.

    A compilation takes a second: it should not fall into the step of the first roll.
    """
    if not segment.sinks or not (INTERPRET or compiled(segment.buffer.device)):
        return
    nothing = (Move(0, 0, 0, 0, 1, 1),)  # no rows
    by_kernel([segment], nothing, None if segment.originals is None else turn([segment], nothing))


@lru_cache(maxsize=16)
def places(moves: tuple[Move, ...], rows: int, device: torch.device) -> Tensor:
    """The moves on the device, int32 ``[rows, 4]``: old, new, start and count of what goes to the front; -1: nothing.

    All layers of a step ask for the same.
    """
    lines = [[-1, -1, 0, 0]] * rows
    for move in moves:
        lines[move.first : move.last] = [[move.old, move.new, move.new, move.back]] * (move.last - move.first)
    return upload(lines, torch.int32, device)
