"""Rolling the windows of all layers in one launch per step, instead of launches for each layer.

When a window rolls, the host updates its start at once (`RollingSegment.roll`), while the work of the device is
deferred until the method has processed all layers. Then the sinks' keys of all layers are rotated as one tensor and
written by one kernel, which finds the buffers in a table of addresses; without compiled kernels, torch copies lists of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Deferred, addresses, upload
from kvbench.cache.kernels.pack import compiled
from kvbench.cache.kernels.reads import uncopied

#: True to run the kernels in Triton's interpreter on a CPU (tests)
INTERPRET = False
#: number of elements that a program of :func:`kvbench.cache.kernels.exact_kernels.move_to_front` copies at a time
ELEMENTS = 8192
#: number of elements of keys that are rotated at a time (32 rows of a 7B model; about 300 MB in fp32 with copies)
TURNED = 1 << 24
#: number of sinks that a program of :func:`kvbench.cache.kernels.exact_kernels.write_sinks` copies at a time
SINKS = 8


class Move(NamedTuple):
    """One step of a rolling window in some adjacent rows: which tokens move from where to where in the buffer.

    The sinks (the first tokens, which are never dropped) are rewritten in front of the tokens that remain.

    Attributes:
        first, last: the rows: from `first` to `last` - 1.
        old, new: buffer index of the first sink before and after the step.
        evicted: number of tokens dropped so far, by which the positions of the sinks' keys are rotated.
        back: number of tokens, sinks included, that are then moved from index `new` to the front of the buffer, as the
            next step would run past its end; else 0.
    """

    first: int
    last: int
    old: int
    new: int
    evicted: int
    back: int = 0


class Rolling(Protocol):
    """Interface of a segment with a rolling window.

    :class:`kvbench.cache.segments.rolling.RollingSegment` implements it.
    """

    buffer: Tensor
    sinks: int
    originals: Tensor | None
    turn: Callable[[Tensor, int | Sequence[int]], Tensor] | None
    rolls: Deferred[Roll] | None
    by_torch: set[str]


#: a segment and its moves
Roll = tuple[Rolling, tuple[Move, ...]]


@contextmanager
def rolling_together(rolls: Deferred[Roll]) -> Iterator[list[Roll]]:
    """Defer the moves of rolling windows to the end of a ``with`` block, so that layers can share kernel launches.

    Within the block, nothing may read or write a window after it has been moved. `rolls` is the cache's queue
    (``Progress.rolls``).

    Yields:
        The list of deferred pairs (segment, its moves), which grows within the block.
    """
    deferred: list[Roll] = []
    try:
        with rolls.collecting() as deferred:
            yield deferred
    finally:
        carry_out_rolls(deferred)  # also after an error, as the host's offsets are already updated


def roll(segment: Rolling, move: Move) -> None:
    """Move the tokens of a rolling window, at once or at the end of a ``with`` block of :func:`rolling_together`."""
    if segment.originals is None and move.old == move.new and not move.back:
        return
    if segment.rolls is None or segment.rolls.jobs is None:
        carry_out_rolls([(segment, (move,))])
    else:
        segment.rolls.jobs.append((segment, (move,)))


def moves_by_segment(rolls: Sequence[Roll]) -> dict[int, Roll]:
    """Merge entries of the same segment, keeping the order of moves; return them under the segments' ``id``."""
    by_segment: dict[int, Roll] = {}
    for segment, moves in rolls:
        known = by_segment.get(id(segment))
        by_segment[id(segment)] = (segment, moves if known is None else known[1] + moves)
    return by_segment


def carry_out_rolls(rolls: Sequence[Roll]) -> None:
    """Carry out deferred moves in their order; segments with the same shape and the same moves share a launch."""
    alike: dict[Hashable, tuple[tuple[Move, ...], list[Rolling]]] = {}
    for segment, moves in moves_by_segment(rolls).values():
        if moves:
            buffer = segment.buffer
            key = (buffer.shape, buffer.dtype, buffer.device, segment.sinks, segment.turn, moves)
            alike.setdefault(key, (moves, []))[1].append(segment)
    for moves, segments in alike.values():
        roll_alike(segments, moves)


def roll_alike(segments: Sequence[Rolling], moves: tuple[Move, ...]) -> None:
    """Carry out the same `moves` in each of several segments of one shape.

    The keys of the sinks are rotated first if need be, then the tokens are moved.
    """
    keys = segments[0].originals
    most = len(segments) if keys is None else max(TURNED // keys.numel(), 1)
    considered = INTERPRET or compiled(segments[0].buffer.device)
    reason = uncopied(segments[0].buffer.dtype) if considered else None
    if reason:
        for segment in segments:
            segment.by_torch.add(f"rolling by torch ({reason})")
    do = by_kernel if considered and reason is None else by_torch
    for first in range(0, len(segments), most):
        some = segments[first : first + most]
        do(some, moves, None if keys is None else turn(some, moves))


def turn(segments: Sequence[Rolling], moves: Sequence[Move]) -> Tensor:
    """Rotate the saved original keys of the sinks (RoPE) by ``Move.evicted`` positions, in each of several segments.

    Returns:
        ``[B, segments x H, sinks, D]``. The contents of rows that are in no move are meaningless and must not be used.
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
    """Carry out the same `moves` in each of several segments of one shape, with torch operations.

    `turned` are the rotated keys of the sinks (:func:`turn`); None if the sinks are moved without rotation.
    """
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for move in moves:
        rows, count = slice(move.first, move.last), segments[0].sinks
        for segment in segments:
            targets.append(segment.buffer[rows, :, move.new : move.new + count])
        if turned is not None:
            joint = turned[rows]
        else:  # a copy, as old and new places may overlap
            joint = torch.cat([segment.buffer[rows, :, move.old : move.old + count] for segment in segments], 1)
        sources.extend(joint.chunk(len(segments), 1))
    torch._foreach_copy_(targets, sources)
    for move in moves:
        for segment in segments if move.back else ():
            live = segment.buffer[move.first : move.last, :, move.new : move.new + move.back]
            segment.buffer[move.first : move.last, :, : move.back].copy_(live.clone() if move.new < move.back else live)


def by_kernel(segments: Sequence[Rolling], moves: tuple[Move, ...], turned: Tensor | None) -> None:
    """Do what :func:`by_torch` does, with one or two kernel launches.

    The first kernel writes the sinks to their new places. The second is needed only near the end of the buffers; it
    moves all tokens to the front.
    """
    import triton

    from kvbench.cache.kernels.exact_kernels import move_to_front, write_sinks

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


def warm_rolling(segment: Rolling) -> None:
    """Compile the kernels that will move tokens of a window of this shape and dtype later, without moving any.

    Compilation takes about a second, which would otherwise be part of the first step in which the window rolls.
    """
    if not segment.sinks or not (INTERPRET or compiled(segment.buffer.device)) or uncopied(segment.buffer.dtype):
        return
    nothing = (Move(0, 0, 0, 0, 1, 1),)  # no rows
    by_kernel([segment], nothing, None if segment.originals is None else turn([segment], nothing))


@lru_cache(maxsize=16)
def places(moves: tuple[Move, ...], rows: int, device: torch.device) -> Tensor:
    """Return the moves of a segment as a table for the kernels, with a line for each row of the batch.

    Results are cached, because all layers of a step need the same table.

    Returns:
        int32 ``[rows, 4]``. The columns are the buffer index of the first sink before and after the move, then the
        start and the number of the tokens that are moved to the front. A row that does not move has -1, -1, 0, 0.
    """
    lines = [[-1, -1, 0, 0]] * rows
    for move in moves:
        lines[move.first : move.last] = [[move.old, move.new, move.new, move.back]] * (move.last - move.first)
    return upload(lines, torch.int32, device)
