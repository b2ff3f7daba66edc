"""Adding a step's attention to the scores of tokens, and dropping each head's token with the lowest score (H2O).

Both happen in one launch. The host need not know which tokens are dropped, only that each head has dropped one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvbench.cache.kernels.reads import uncopied

if TYPE_CHECKING:
    from kvbench.cache.segments.base import FullSegment
    from kvbench.cache.segments.scored import ScoredSegment

#: slots per iteration of a program, and its warps
BLOCK, WARPS = 4096, 16
#: largest number of queries in a step; with more, torch's operations take over
QUERIES = 16


def can_drop_lowest(tail: ScoredSegment, values: FullSegment, rows: slice) -> bool:
    """Return True if the kernel can do the work of :func:`drop_lowest` for some rows of equal numbers of tokens.

    It can if the buffers are on a GPU and the attention of exactly one step is pending, in one tensor for all rows. If
    it does not take the dtype of the keys, the segment records the reason.
    """
    if not tail.buffer.is_cuda:
        return False
    reason = uncopied(tail.dtype)
    if reason:
        tail.by_torch.add(f"eviction by torch ({reason})")
        return False
    steps = [tail.pending[row] for row in range(*rows.indices(len(tail.lengths)))]
    if any(len(pending) != 1 for pending in steps):
        return False
    first, length = steps[0][0], tail.length(rows)
    size = first.stride(0) * tail.heads * first.element_size()
    return (
        first.stride(3) == 1
        and first.stride(0) == first.shape[1] * first.stride(1)
        and first.shape[2] <= QUERIES
        and all(one[0].shape == first.shape and one[0].stride() == first.stride() for one in steps)
        and all(one[0].data_ptr() == first.data_ptr() + i * size for i, one in enumerate(steps))
        and first.shape[3] == length
        and all(known == tail.known[rows][0] for known in tail.known[rows])
        and all(
            part.capacity == tail.capacity and part.starts[rows] == tail.starts[rows]
            for part in (*tail.parts(), values)
        )
        and all(seen == tail.seen[rows][0] for seen in tail.seen[rows])
    )


def drop_lowest(
    tail: ScoredSegment, values: FullSegment, rows: slice, candidates: int, *, per_query: bool = False
) -> None:
    """Add the pending attention of some rows to their scores, then drop the token with the lowest score in each head.

    The first token of each head takes the slot of the dropped one. Of equal scores, that of the newest token is the
    lowest. :func:`can_drop_lowest` must have returned True.

    Args:
        tail: segment of the keys, with scores and places.
        candidates: number of first slots of which the lowest is dropped; 0: drop none.
        per_query: True to divide scores by the number of queries that could see the token.
    """
    from kvbench.cache.kernels.evict_kernel import add_and_drop

    indices = range(*rows.indices(len(tail.lengths)))
    received = tail.pending[indices[0]][0]
    with torch.cuda.device_of(tail.buffer):
        add_and_drop[(len(indices) * tail.heads,)](
            tail.buffer,
            values.buffer,
            tail.scores.buffer,
            tail.places.buffer,
            received,
            received.stride(0) * tail.heads,
            received.stride(1),
            received.stride(2),
            indices[0],
            tail.heads,
            tail.capacity,
            tail.starts[indices[0]],
            tail.lengths[indices[0]],
            tail.known[indices[0]],
            candidates,
            tail.seen[indices[0]] - 1,
            tail.channels,
            values.channels,
            received.shape[1],
            received.shape[2],
            per_query,
            BLOCK,
            num_warps=WARPS,
        )
    tail.committed(rows)
    if candidates:
        tail.drop_front(rows, 1)
        values.drop_front(rows, 1)
