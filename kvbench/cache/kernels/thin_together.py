"""Thinning of windows, at once or for all layers of a cache in one launch, after those that go are packed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import addresses
from kvbench.cache.kernels.reads import uncopied

#: True to run the kernel in Triton's interpreter on a CPU (tests)
INTERPRET = False
#: number of elements that a program copies at a time
ELEMENTS = 8192


@dataclass(frozen=True)
class Thin:
    """Every second one of a window's oldest tokens, which waits to be dropped.

    Args:
        buffer: the window's buffer, ``[B, H, capacity, D]``.
        rows: rows of the batch, first and last + 1.
        start: index of the first token in the buffer.
        length: number of tokens before.
        count: number of tokens to drop: the second, the fourth, ... of the first ``2 * count``.
    """

    buffer: Tensor
    rows: tuple[int, int]
    start: int
    length: int
    count: int

    def signature(self) -> Hashable:
        """Return a key that is equal for two jobs exactly if they can share a launch."""
        buffer = self.buffer
        return (buffer.shape, buffer.dtype, buffer.device, self.rows, self.start, self.length, self.count)


def thin_windows(group: Sequence[Thin]) -> None:
    """Thin several windows; on a GPU in one launch, unless the kernel does not take their dtype.

    The jobs have equal signatures (:meth:`Thin.signature`).
    """
    job = group[0]
    if not (job.buffer.is_cuda or INTERPRET) or uncopied(job.buffer.dtype):
        for member in group:
            plainly(member)
        return
    from kvbench.cache.kernels.thin_kernel import thin_windows_kernel

    _, heads, room, channels = job.buffer.shape
    block = 1 << (channels - 1).bit_length()
    with torch.cuda.device_of(job.buffer):
        thin_windows_kernel[((job.rows[1] - job.rows[0]) * heads, len(group))](
            addresses(tuple(member.buffer.data_ptr() for member in group), job.buffer.device),
            job.buffer,
            job.rows[0],
            heads,
            room,
            job.start,
            job.length,
            job.count,
            channels,
            block,
            max(ELEMENTS // block, 1),
        )


def plainly(job: Thin) -> None:
    """Thin one window by torch's operations."""
    live = job.buffer[slice(*job.rows), :, job.start : job.start + job.length]
    live[:, :, : job.length - job.count] = live.index_select(2, remaining(job.count, job.length, live.device))


@lru_cache(maxsize=16)
def remaining(count: int, length: int, device: torch.device) -> Tensor:
    """Return the indices of the tokens that stay.

    These are every other one of the first ``2 * count``, beginning with the first, and all tokens after them.
    """
    with torch.inference_mode(False):
        indices = [*range(0, 2 * count, 2), *range(2 * count, length)]
        return torch.tensor(indices, dtype=torch.long, device=device)
