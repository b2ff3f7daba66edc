"""A ceiling on memory, so that a method can be shown to fit where another one does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited(device: torch.device | str, limit_gb: float | None) -> Iterator[bool]:
    """Limit the memory of this process to `limit_gb` GiB within the block; beyond it is an out-of-memory error.

    On CUDA the limit is on torch's allocator of `device`; the context (about half a GiB) is not in it. On a CPU (Linux)
    it is on what comes on top of what the process holds already, since an interpreter with torch takes some GiB of
    address space to begin with.

    Yields:
        Whether a limit could be set: False where none was asked for, or the platform has none.
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
    """Return the private writable memory mapped by this process (as RLIMIT_DATA counts it), None where unknown."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as handle:
            for line in handle:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
