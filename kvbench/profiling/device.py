"""A process's device: its product name, a limit on its memory, and a guard against torch's switch from oneDNN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def device_name(device: torch.device | str) -> str | None:
    """Return the product name of a GPU, such as ``NVIDIA H200``.

    None for a CPU, whose name torch does not know; for any other device its type, such as ``mps``.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return None if device.type == "cpu" else device.type


def identity(device: torch.device | str) -> tuple[str, int] | None:
    """Return a GPU's identifier, the same in all processes, and its memory in bytes; None for other devices."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{properties.name} {device.index or 0}"), properties.total_memory


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


@contextmanager
def kept(*, strict: bool) -> Iterator[None]:
    """Undo, at the end of a ``with`` block, torch's switch away from oneDNN after an out-of-memory error.

    If a matrix product on a CPU runs out of memory inside oneDNN, torch raises no error. It issues a warning and uses a
    different library from then on; prompts in bfloat16 took ten times as long with it. This context manager turns
    oneDNN on again, so that the code after the block is not slow too.

    Args:
        strict: True to raise an error if torch switched inside the block, because times measured there are not
            comparable.

    Raises:
        MemoryError: `strict` is True, and torch switched. An error raised by the block itself takes precedence.
    """
    before = torch.backends.mkldnn.enabled
    left = False
    try:
        yield
    finally:
        left = bool(before) and not torch.backends.mkldnn.enabled
        if left:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    if left and strict:
        raise MemoryError("a matrix product ran out of memory inside oneDNN, and torch fell back to another library")
