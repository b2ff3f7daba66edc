"""Windows that roll in the same step, in all layers at once: their sinks cost no launches a layer.

The host knows at once where a window begins anew (`RollingSegment.roll`); what the device
has to do for it is put off until all layers have settled. Then the sinks' keys of all layers are turned as one tensor,
and a kernel writes them over a table of addresses; where none is compiled, one copy of lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.pack import compiled
from kvbench.cache.kernels.tables import addresses, upload

#: run the kernels in Triton's interpreter on a CPU (tests)
INTERPRET = False
#: elements of a program of :func:`kvbench.cache.kernels.roll_kernel.move_to_front` at a time
ELEMENTS = 8192
#: elements of keys that are turned at a time: those of 32 rows of a 7B model, in fp32 and with copies about 300 MB
TURNED = 1 << 24
#: sinks of a program of :func:`kvbench.cache.kernels.roll_kernel.write_sinks` at a time
SINKS = 8


class Move(NamedTuple):
    """A move that rows ``[first, last)`` of a segment have in common.

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


class Rolling(Protocol):
    """The fields of a rolling segment (:class:`kvbench.cache.segments.rolling.RollingSegment`) that are read here."""

    buffer: Tensor
    sinks: int
    originals: Tensor | None
    turn: Callable[[Tensor, int | Sequence[int]], Tensor] | None
    rolls: Deferred[Roll] | None


#: a segment, and what moves in it
Roll = tuple[Rolling, tuple[Move, ...]]


@contextmanager
def together(rolls: Deferred[Roll]) -> Iterator[list[Roll]]:
    """Defer the rolls of a cache's layers inside, and launch one kernel for each group of identical ones at the end.

    Only where nothing inside reads or writes the windows after they have rolled.

    Yields:
        The rolls deferred so far.
    """
    deferred: list[Roll] = []
    try:
        with rolls.collecting() as deferred:
            yield deferred
    finally:
        launch(deferred)  # also after an error: the host counts with it


def roll(segment: Rolling, move: Move) -> None:
    """Move the sinks of `segment`, now or, inside :func:`together`, later."""
    if segment.originals is None and move.old == move.new and not move.back:
        return
    if segment.rolls is None or segment.rolls.jobs is None:
        launch([(segment, (move,))])
    else:
        segment.rolls.jobs.append((segment, (move,)))


def joined(rolls: Sequence[Roll]) -> dict[int, Roll]:
    """Return all moves of each segment, by its identity."""
    by_segment: dict[int, Roll] = {}
    for segment, moves in rolls:
        known = by_segment.get(id(segment))
        by_segment[id(segment)] = (segment, moves if known is None else known[1] + moves)
    return by_segment


def launch(rolls: Sequence[Roll]) -> None:
    """Carry out `rolls`, those alike in one launch."""
    alike: dict[Hashable, tuple[tuple[Move, ...], list[Rolling]]] = {}
    for segment, moves in joined(rolls).values():
        if moves:
            buffer = segment.buffer
            key = (buffer.shape, buffer.dtype, buffer.device, segment.sinks, segment.turn, moves)
            alike.setdefault(key, (moves, []))[1].append(segment)
    for moves, segments in alike.values():
        run(segments, moves)


def run(segments: Sequence[Rolling], moves: tuple[Move, ...]) -> None:
    """Carry out the same moves of segments of one shape."""
    keys = segments[0].originals
    most = len(segments) if keys is None else max(TURNED // keys.numel(), 1)
    do = by_kernel if INTERPRET or compiled(segments[0].buffer.device) else by_torch
    for first in range(0, len(segments), most):
        some = segments[first : first + most]
        do(some, moves, None if keys is None else turn(some, moves))


def turn(segments: Sequence[Rolling], moves: Sequence[Move]) -> Tensor:
    """Return the sinks' keys of all segments ``[B, segments x H, sinks, D]``, turned as the moves say.

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


def by_torch(segments: Sequence[Rolling], moves: Sequence[Move], turned: Tensor | None) -> None:
    """Carry out moves in plain torch."""
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


def by_kernel(segments: Sequence[Rolling], moves: tuple[Move, ...], turned: Tensor | None) -> None:
    """Launch one kernel for the sinks, and one for what goes to the front of its buffer."""
    import triton

    from kvbench.cache.kernels.roll_kernel import move_to_front, write_sinks

    buffer, sinks = segments[0].buffer, segments[0].sinks
    rows, heads, room, channels = buffer.shape
    block = triton.next_power_of_2(channels)
    where = places(moves, rows, buffer.device)
    table = addresses(tuple(segment.buffer.data_ptr() for segment in segments), buffer.device)
    grid = (rows * heads, len(segments))
    with torch.cuda.device_of(buffer):
        write_sinks[grid](
            table,
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
            move_to_front[grid](table, buffer, where, heads, room, channels, block, tokens, num_stages=1)


def warm(segment: Rolling) -> None:
    """Compile the kernels that will roll `segment` later; nothing moves now.

    A compilation takes a second: it should not fall into the step of the first roll.
    """
    if not segment.sinks or not (INTERPRET or compiled(segment.buffer.device)):
        return
    nothing = (Move(0, 0, 0, 0, 1, 1),)  # no rows
    by_kernel([segment], nothing, None if segment.originals is None else turn([segment], nothing))


@lru_cache(maxsize=16)
def places(moves: tuple[Move, ...], rows: int, device: torch.device) -> Tensor:
    """Return the moves on the device, int32 ``[rows, 4]``.

    Columns: old and new place of the sinks, start and count of what goes to the front; -1: nothing moves.

    All layers of a step ask for the same.
    """
    lines = [[-1, -1, 0, 0]] * rows
    for move in moves:
        lines[move.first : move.last] = [[move.old, move.new, move.new, move.back]] * (move.last - move.first)
    return upload(lines, torch.int32, device)
