"""The steps that no kernel for a codebook's codes can compute, whichever language it is written in."""

from __future__ import annotations

from torch import Tensor

from kvbench.attention.phases import Work
from kvbench.attention.reads import LOOKED_UP_KEYS, LOOKED_UP_VALUES, misfit

#: head dimensions that the kernels support
HEAD_DIMS = (64, 128)


def unfit(query: Tensor, work: Work) -> str | None:
    """Return why neither kernel can compute the attention of a decode step, or None if both may."""
    reason = misfit(query, work, HEAD_DIMS, LOOKED_UP_KEYS, LOOKED_UP_VALUES)
    if reason:
        return reason
    if query.shape[2] > 1:
        return f"{query.shape[2]} new tokens"
    kinds = [(key.format.kind, value.format.kind) for key, value in work.phases]
    if any(key != value for key, value in kinds) or kinds.count(("codebook", "codebook")) != 1:
        return "keys and values that are packed at different tokens"
    packed = place_of_codes(work)
    key, value = work.phases[packed]
    if key.format.bits != value.format.bits:
        return f"keys of {key.format.bits} and values of {value.format.bits} bits"
    if packed > 1 or len(kinds) - packed > 2 or any(row[packed][0] or row[packed][1] for row in work.counts):
        return "more than one run of tokens in full precision before or after the packed ones"
    for one, other in work.phases:
        if one.buffer is not None and other.buffer is not None and one.buffer.shape[2] != other.buffer.shape[2]:
            return "buffers of keys and of values of different lengths"
    return None


def place_of_codes(work: Work) -> int:
    """Return the number of the phase whose codes are looked up in a codebook."""
    return next(i for i, (key, _) in enumerate(work.phases) if key.format.kind == "codebook")
