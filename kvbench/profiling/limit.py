"""A limit on this process's memory, to show that one method fits where another does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited(device: torch.device | str, limit_gb: float | None) -> Iterator[bool]:
    """Limit the memory that this process may allocate inside a ``with`` block.

    An allocation beyond the limit raises an out-of-memory error. On CUDA, the limit applies to torch's allocator on
    `device`; the CUDA context (about half a GiB) does not count. On a CPU (Linux only), it applies to what is allocated
    inside the block; memory that was mapped before, several GiB in a Python process with torch, does not count.

    Args:
        limit_gb: the limit in GiB; None for no limit.

    Yields:
        True if the limit is set; False if `limit_gb` is None, or if the platform cannot limit memory.
    """
    device = torch.device(device)
    if limit_gb is None:
        yield False
    elif device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index  # a number is required
        whole = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 2**30 / whole), index)
        try:
            yield True
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
    else:
        mapped = _data_bytes() if device.type == "cpu" else None
        if mapped is None:
            yield False
            return
        import resource

        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (mapped + int(limit_gb * 2**30), before[1]))
        try:
            yield True
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int | None:
    """Return the bytes of private writable memory that this process has mapped, as RLIMIT_DATA counts them, or None."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as handle:
            for line in handle:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
