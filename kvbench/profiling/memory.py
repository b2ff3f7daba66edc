"""Peak memory of prefill and decode, and a census of live tensors.

On CUDA the peaks come from torch's allocator, whose peak is reset at each phase. A CPU has no such statistics, so the
storages of live tensors are counted as they are created and freed. This is slow, so it is done in one generation only,
and it misses the memory that a kernel allocates for itself while it runs. Results record how a peak was measured
(:attr:`PhasePeaks.kind`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PREFILL, DECODE, STEPS, END = "prefill", "decode", "steps", "end"


@dataclass(frozen=True)
class LiveTensor:
    """An allocated storage of `nbytes` bytes, with shape and dtype of one of the tensors that use it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class TensorCensus(TorchDispatchMode):
    """A context manager that measures the peak memory of CPU tensors in each phase, such as prefill and decode.

    It adds up the storages of live tensors as torch creates and frees them. Storages that are alive when the block
    begins, such as weights, count too. Call :meth:`phase` at the beginning of each phase.

    Attributes:
        current: bytes of the storages that are alive now.
        peaks: for each phase by name, the largest value of `current`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self._live: dict[int, LiveTensor] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    def __enter__(self) -> TensorCensus:
        for tensor in _tracked_tensors():
            if tensor.device.type == "cpu":
                self._meet(tensor)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()

    def phase(self, name: str) -> None:
        """Begin a new phase and end the current one, or only end it with ``end``.

        Tensors that are alive at its beginning count towards its peak.
        """
        self._phase = "" if name == END else name
        self._note()

    def live(self) -> list[LiveTensor]:
        """List the storages that are alive now, largest first."""
        return sorted(self._live.values(), key=lambda item: -item.nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._meet(leaf)
        return result

    def _meet(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse and functional tensors have no storage to count
        if storage.device.type == "meta":
            return  # a compiler's fake tensors say that they are on a CPU
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        self._live[key] = LiveTensor(tuple(tensor.shape), tensor.dtype, nbytes)
        self.current += nbytes
        finalizer = weakref.finalize(storage, self._leave, key)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        if len(self._finalizers) > 100_000:
            self._finalizers = [item for item in self._finalizers if item.alive]
        self._note()

    def _leave(self, key: int) -> None:
        gone = self._live.pop(key, None)
        if gone is not None:
            self.current -= gone.nbytes

    def _note(self) -> None:
        if self._phase:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.current)


class PhasePeaks:
    """A recorder of the peak memory of prefill and of decoding in one generation.

    Generate inside ``with peaks.run():`` and pass this object as ``observer=``, so that :meth:`phase` is called when
    each phase begins. :meth:`row` then returns the peaks.

    Args:
        census: on a CPU, True to track every live tensor (:class:`TensorCensus`), which is slow; False to measure only
            the process's peak RSS. On CUDA, this has no effect: the peaks are those of torch's allocator.

    Attributes:
        peaks: peak bytes by name of the phase.
    """

    def __init__(self, device: torch.device | str, *, census: bool = False) -> None:
        self.device = torch.device(device)
        self.peaks: dict[str, int] = {}
        self._census = TensorCensus() if census and self.device.type == "cpu" else None
        self._phase = ""

    @property
    def kind(self) -> str | None:
        """Source of the peaks: ``cuda_allocator``, ``cpu_live_tensors``, or None if only the peak RSS is measured."""
        if self.device.type == "cuda":
            return "cuda_allocator"
        return "cpu_live_tensors" if self._census else None

    def run(self) -> AbstractContextManager[Any]:
        """Reset the peak RSS, and return a context manager in which the caller runs the generation."""
        reset_peak_rss()
        return self._census if self._census is not None else nullcontext()

    def phase(self, name: str) -> None:
        """Begin the phase ``prefill`` or ``decode``; ``end`` ends the current one without beginning another.

        ``steps``, the part of ``decode`` after a capture, changes nothing: the capture's memory belongs to decoding.
        """
        if name == STEPS:
            return
        if self._census is not None:
            self._census.phase(name)
            self.peaks = self._census.peaks
        elif self.device.type == "cuda":
            if self._phase:
                self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), cuda_peak())
            cuda_reset_peak()
            self._phase = "" if name == END else name

    def row(self) -> dict[str, Any]:
        """Return the peaks for the result row.

        Returns:
            ``prefill`` and ``decode`` (peak bytes, or None if the phase did not occur), ``kind`` and ``rss`` (the
            process's peak resident set size in bytes, or None).
        """
        return {
            PREFILL: self.peaks.get(PREFILL),
            DECODE: self.peaks.get(DECODE),
            "kind": self.kind,
            "rss": peak_rss(),
        }


def cuda_peak() -> int:
    """Return the peak of allocated bytes since :func:`cuda_reset_peak`, summed over all visible GPUs.

    With several GPUs, the sum is an upper bound, because their peaks need not coincide.
    """
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def cuda_reset_peak() -> None:
    """Reset the peak of allocated bytes on every visible GPU."""
    torch.cuda.init()  # before the first allocation there are no statistics to reset
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


def peak_rss() -> int | None:
    """Return the peak resident set size of this process in bytes, or None if the platform does not report it.

    On Linux, it is the peak since :func:`reset_peak_rss`; elsewhere, since the process began.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as handle:
            for line in handle:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, UnicodeDecodeError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def reset_peak_rss() -> None:
    """Reset the peak RSS (Linux only), so that a run does not inherit the peak of an earlier run in this process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")
    except OSError:
        pass


def release(device: torch.device | str) -> None:
    """Run the garbage collector and empty torch's CUDA cache, for example after running out of memory."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _tracked_tensors() -> Iterator[torch.Tensor]:
    for item in gc.get_objects():
        try:
            if issubclass(type(item), torch.Tensor) and item.layout is torch.strided and not item.is_meta:
                yield item
        except (ReferenceError, RuntimeError):  # a weak proxy whose object died, or an odd subclass
            continue
