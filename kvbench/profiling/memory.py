"""Peak memory of prefill and of decode, and a census of live tensors.

On CUDA the peaks are the allocator's (reset at each phase). A CPU has no such allocator, so the storages of live
tensors are counted as they are made and freed: slower, hence done on one sample, and without what a kernel takes for
itself while it runs. The kind of figure always stands beside it.
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

PREFILL, DECODE, END = "prefill", "decode", "end"


@dataclass(frozen=True)
class LiveTensor:
    """One storage that is alive, with the shape and type of a tensor that looks into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def live_tensors(device_type: str | None = None, *, min_bytes: int = 0) -> list[LiveTensor]:
    """Return the storages that Python objects hold at this moment, each once, largest first.

    Finds what the garbage collector tracks (parameters, buffers, cached tensors); a tensor that only C++ holds is not
    seen, which is why :class:`TensorCensus` follows storages from their birth where that matters.
    """
    storages: dict[int, LiveTensor] = {}
    for tensor in _tracked_tensors():
        if device_type is not None and tensor.device.type != device_type:
            continue
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            continue
        known = storages.get(storage._cdata)
        if storage.nbytes() >= min_bytes and (known is None or _numel(known.shape) < tensor.numel()):
            storages[storage._cdata] = LiveTensor(tuple(tensor.shape), tensor.dtype, storage.nbytes())
    return sorted(storages.values(), key=lambda item: -item.nbytes)


class TensorCensus(TorchDispatchMode):
    """Counts the bytes of live tensor storages while it is active, and keeps the peak of each phase.

    Storages that were alive when it began (weights) count from the start. A storage leaves the count when it is freed.
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
        """Begin a phase, which counts storages that are alive at its beginning; ``end`` begins none."""
        self._phase = "" if name == END else name
        self._note()

    def live(self) -> list[LiveTensor]:
        """Return all storages that are alive, largest first."""
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
    """Peak bytes per phase of one generation; pass it to `generate` as the observer and run that inside :meth:`run`.

    Args:
        device: where the model runs.
        census: count live tensors on a CPU (slow); without it a CPU only has its peak RSS.
    """

    def __init__(self, device: torch.device | str, *, census: bool = False) -> None:
        self.device = torch.device(device)
        self.peaks: dict[str, int] = {}
        self._census = TensorCensus() if census and self.device.type == "cpu" else None
        self._phase = ""

    @property
    def kind(self) -> str | None:
        """``cuda_allocator``, ``cpu_live_tensors``, or None where only the RSS is known."""
        if self.device.type == "cuda":
            return "cuda_allocator"
        return "cpu_live_tensors" if self._census else None

    def run(self) -> AbstractContextManager[Any]:
        """Return the context in which the generation is measured."""
        reset_peak_rss()
        return self._census if self._census is not None else nullcontext()

    def phase(self, name: str) -> None:
        """Begin the phase ``prefill``, ``decode`` or ``end``."""
        if self._census is not None:
            self._census.phase(name)
            self.peaks = self._census.peaks
        elif self.device.type == "cuda":
            if self._phase:
                self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), cuda_peak())
            cuda_reset_peak()
            self._phase = "" if name == END else name

    def row(self) -> dict[str, Any]:
        """Return ``{prefill, decode, kind, rss}`` in bytes; decode is None for an answer of one token."""
        return {
            PREFILL: self.peaks.get(PREFILL),
            DECODE: self.peaks.get(DECODE),
            "kind": self.kind,
            "rss": peak_rss(),
        }


def cuda_peak() -> int:
    """Return the peak of allocated bytes since the last reset, summed over the visible devices (exact with one)."""
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def cuda_reset_peak() -> None:
    """Start a new peak on every device."""
    torch.cuda.init()  # before the first allocation there are no statistics to reset
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


def peak_rss() -> int | None:
    """Return the peak of resident bytes: since :func:`reset_peak_rss` on Linux, else since the process began."""
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
    """Forget the peak so far, so that a run in a sweep does not inherit its predecessor's (Linux only)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")
    except OSError:
        pass


def release(device: torch.device | str) -> None:
    """Give freed memory back after a run, above all after it ran out of it."""
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


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
