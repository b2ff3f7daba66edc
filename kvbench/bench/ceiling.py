"""Read bandwidth of this device: the ceiling that kernels are compared with, measured in the same run."""

from __future__ import annotations

from functools import partial

import torch

from kvbench.bench.clock import copies, replayed

#: sizes of the timed reads, MiB: the small ones give lower bounds for small operations, the largest the ceiling
SIZES = (4, 16, 64, 256, 1024, 4096)


class Ceiling:
    """The GPU's read bandwidth: measured times of a kernel that does nothing but read, for several buffer sizes.

    `points` are (bytes, microseconds) for each size of buffer, smallest first; `kernel` did the reads: ``triton`` or
    ``torch.sum``.
    """

    def __init__(self, points: list[tuple[int, float]], kernel: str) -> None:
        self.points, self.kernel = points, kernel

    @property
    def rate(self) -> float:
        """Upper bound on any kernel's read bandwidth in GB/s: the bandwidth measured with the largest buffer."""
        size, us = self.points[-1]
        return size / us / 1e3

    def floor(self, size: int) -> float:
        """Return the lower bound, in microseconds, on the time in which a kernel can read `size` bytes.

        It is interpolated between the measured sizes. Above the largest, it is proportional to the size; below the
        smallest, it is the time of the smallest, which is that of a launch.
        """
        below, above = self.points[0], self.points[-1]
        if size >= above[0]:
            return above[1] * size / above[0]
        if size <= below[0]:
            return below[1]  # the time of a small read is that of its launch
        for low, high in zip(self.points, self.points[1:], strict=False):
            if low[0] <= size <= high[0]:
                return low[1] + (high[1] - low[1]) * (size - low[0]) / (high[0] - low[0])
        raise AssertionError

    def as_dict(self) -> dict[str, object]:
        """Return the bandwidth, the kernel's name and all measured reads as a dictionary for the JSON file."""
        rows = [{"bytes": size, "us": round(us, 3), "GB_s": round(size / us / 1e3, 1)} for size, us in self.points]
        return {"GB_s": round(self.rate, 1), "kernel": self.kernel, "reads": rows}


def measure_ceiling(seconds: float = 0.2) -> Ceiling:
    """Measure how fast this GPU can read its memory, with buffers of several sizes.

    The sizes are those of :data:`SIZES` that fit into the free memory with some to spare; measuring takes `seconds` for
    each.
    """
    free = torch.cuda.mem_get_info()[0]
    points, name = [], "torch.sum"
    for mib in SIZES:
        size = mib << 20
        if size * 1.5 > free:
            break
        count = copies(size)
        buffers = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(count)]
        name, read = reader(buffers[0].device)
        points.append((size, replayed([partial(read, x) for x in buffers], seconds).us))
    return Ceiling(points, name)


def reader(device: torch.device):  # type: ignore[no-untyped-def]
    """Return a function that reads a whole int32 buffer as fast as possible, preceded by the function's name.

    It is ``triton``, a Triton kernel, or without Triton ``torch.sum``.
    """
    try:
        from kvbench.bench.read_kernel import read_buffer
    except ImportError:
        out = torch.empty((), dtype=torch.float32, device=device)
        return "torch.sum", lambda x: torch.sum(x.view(torch.float32), dim=0, out=out)
    sink = torch.zeros(4096, dtype=torch.int32, device=device)
    return "triton", lambda x: read_buffer(x, sink)
