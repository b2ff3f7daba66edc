"""Triton kernel that adds the attention of a step to the scores of tokens, and drops the token with the lowest.

One program serves a head: it has all of the head's scores to itself, so no program waits for another.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

#: score of a slot that is no candidate
NEVER = tl.constexpr(float("inf"))


@triton.jit
def copy_slot(buffer, source, target, CHANNELS: tl.constexpr):
    """Copy the channels of one slot of a buffer ``[..., slots, CHANNELS]`` over those of another.

    Slots are counted from the beginning of the buffer. CHANNELS need not be a power of two.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(CHANNELS)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    tl.store(buffer + target * CHANNELS + channel, tl.load(buffer + source * CHANNELS + channel, inside), inside)


# Not specialized: arguments that change from call to call must not cause a recompilation.
@triton.jit(do_not_specialize=["first_row", "room", "start", "slots", "known", "candidates", "newest", "heads"])
def add_and_drop(
    keys,
    values,
    scores,
    places,
    received,
    row_stride,
    score_stride,
    query_stride,
    first_row,
    heads,
    room,
    start,
    slots,
    known,
    candidates,
    newest,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCORES: tl.constexpr,
    QUERIES: tl.constexpr,
    PER_QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a step's attention to the scores of all slots, and put a head's first slot in the place of the lowest.

    The caller then drops the first slot of each head. Of equal scores that of the newest token is the lowest.

    Grid: (rows x H). Strides are those of `received`, in elements.

    Args:
        keys: pointer to the keys, ``[B, H, room, KEY_DIM]``.
        values: pointer to the values, ``[B, H, room, VALUE_DIM]``.
        scores: pointer to the scores, fp32 ``[B, H, room, SCORES]``.
        places: pointer to the numbers of the tokens within their texts, int32 ``[B, H, room]``.
        received: pointer to the attention of the step, fp32 ``[rows, H, SCORES, QUERIES, slots]`` with strides; heads
            follow each other at `SCORES` times the stride of scores.
        first_row: row of the batch to which row 0 of `received` belongs.
        start: index of the first slot in the buffers.
        slots: number of slots in use.
        known: number of slots whose scores and places have been written. The others hold the newest tokens.
        candidates: number of leading slots of which the lowest is dropped; 0 to drop none.
        newest: number of the newest token within its text.
        SCORES: number of scores per token, of which the largest counts.
        PER_QUERY: True to divide a score by the number of queries that could see the token.
        BLOCK: number of slots per iteration.
    """
    row = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    line = ((first_row + row).to(tl.int64) * heads + head) * room + start
    fresh = received + row.to(tl.int64) * row_stride + head.to(tl.int64) * (SCORES * score_stride)
    lane = tl.arange(0, BLOCK)
    least = tl.full((BLOCK,), NEVER, tl.float32)
    least_place = tl.full((BLOCK,), -1, tl.int32)
    least_slot = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, slots, BLOCK):
        slot = first + lane
        inside = slot < slots
        old = slot < known
        place = tl.load(places + line + slot, mask=old, other=0)
        place = tl.where(old, place, newest - (slots - 1 - slot))
        tl.store(places + line + slot, place, mask=inside & (slot >= known))
        for s in tl.static_range(SCORES):
            score = tl.load(scores + (line + slot) * SCORES + s, mask=old, other=0.0)
            gained = tl.zeros((BLOCK,), tl.float32)
            for i in tl.static_range(QUERIES):
                gained += tl.load(fresh + s * score_stride + i * query_stride + slot, mask=inside, other=0.0)
            score += gained
            tl.store(scores + (line + slot) * SCORES + s, score, mask=inside)
            if s == 0:
                worth = score
            else:
                worth = tl.maximum(worth, score)
        if PER_QUERY:
            worth = tl.div_rn(worth, (newest + 1 - place).to(tl.float32))
        worth = tl.where(slot < candidates, worth, NEVER)
        lower = (worth < least) | ((worth == least) & (place > least_place) & (slot < candidates))
        least = tl.where(lower, worth, least)
        least_place = tl.where(lower, place, least_place)
        least_slot = tl.where(lower, slot, least_slot)
    if candidates > 0:
        lowest = tl.min(least, 0)
        latest = tl.max(tl.where(least == lowest, least_place, -1), 0)
        hole = tl.max(tl.where((least == lowest) & (least_place == latest), least_slot, 0), 0)
        tl.debug_barrier()  # scores and places were written by other threads than those that read them now
        copy_slot(keys, line, line + hole, KEY_DIM)
        copy_slot(values, line, line + hole, VALUE_DIM)
        copy_slot(scores, line, line + hole, SCORES)
        copy_slot(places, line, line + hole, 1)
