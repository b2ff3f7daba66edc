"""A captured pass over layers on several devices: one CUDA graph for each run of layers, and copies between the graphs.

A CUDA graph of torch takes memory on one device only. So wherever a forward pass goes on to another device, the capture
of one graph ends and that of the next begins. Tensors that the next device reads (hidden states, rotary angles, tables)
are copied to fixed addresses there. A replay queues graphs and copies in this order on the devices' current streams,
and the copies make each device wait for the one before it, never the host. A pass over one device is one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvbench.cache.layer import KVLayer
from kvbench.parallel.spread import Mover, moved, moving

#: a tensor and its copy on another device
Pair = tuple[Tensor, Tensor]


class Twins:
    """A tensor on the first device with a copy on each other device that holds layers of a cache.

    The tensor on the first device is `home`; only the host or that device changes it.
    """

    def __init__(self, home: Tensor, layers: Iterable[KVLayer]) -> None:
        devices = dict.fromkeys(layer.device for layer in layers if layer.device != home.device)
        self.home = home
        with torch.inference_mode(False):
            self._copies = {device: torch.zeros_like(home, device=device) for device in devices}

    def on(self, device: torch.device) -> Tensor:
        """Return what layers on `device` read: the copy there, or the tensor itself if it is there."""
        return self._copies.get(device, self.home)

    def pairs(self, device: torch.device) -> list[Pair]:
        """Return the tensor and its copy on `device`, as a list of one pair; an empty list if there is no copy."""
        return [(self.home, self._copies[device])] if device in self._copies else []


class Spanning:
    """Base class of passes over layers that may lie on several devices: it copies what the next device reads.

    The host starts a pass from the first device, `device`.

    Attributes:
        twins: tensors of which layers on other devices read copies, in addition to the model's own tensors.
    """

    def __init__(self, layers: Sequence[KVLayer], device: torch.device) -> None:
        self.device = device
        self.twins: list[Twins] = []
        self._layers = layers
        self._mover: Mover = self.copied

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the pass, beginning with the one from which the host starts it."""
        return list(dict.fromkeys([self.device, *(layer.device for layer in self._layers)]))

    def carried(self, device: torch.device) -> list[Pair]:
        """Return the pairs to copy to `device` before the pass continues there, besides the model's own tensors."""
        return [pair for twins in self.twins for pair in twins.pairs(device)]

    def copied(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copy tensors of the model, and the twins, to the device on which the pass goes on."""
        copy(self.carried(device))
        return moved(tensors, device)

    def moving(self) -> AbstractContextManager[None]:
        """Return a context in which the function set by :meth:`crossing` moves the model's tensors between devices."""
        return moving(self._mover)

    @contextmanager
    def crossing(self, by: Mover) -> Iterator[None]:
        """Let `by` copy tensors from device to device within a ``with`` block; it must copy :meth:`carried` too."""
        self._mover = by
        try:
            yield
        finally:
            self._mover = self.copied


class Replayable(Protocol):
    """A recorded graph."""

    def replay(self) -> Any:
        """Queue the graph's work."""
        ...


#: function that starts to record work on a device, and returns a context that yields the graph and ends the recording
Opening = Callable[[torch.device], AbstractContextManager[Replayable]]


@contextmanager
def graph_on(device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the work of a ``with`` block, all of it on one GPU, as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), side_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        yield graph


class Segments:
    """The graphs of one pass and the copies between them, in the order in which they run.

    Record the pass inside :meth:`recording`, and call :meth:`cross` where it goes on to another device.

    Args:
        carried: function that returns, for a device, pairs of a tensor and its copy there that must be updated when the
            pass continues on that device.
        opening: function that captures a graph on a device; tests without a GPU replace :func:`graph_on`.

    Attributes:
        graphs: number of graphs so far.
    """

    def __init__(self, carried: Callable[[torch.device], list[Pair]], opening: Opening = graph_on) -> None:
        self._carried, self._opening = carried, opening
        self._parts: list[Callable[[], object]] = []
        self._open = ExitStack()
        self.graphs = 0

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Record the work of a ``with`` block, which begins on `device`."""
        self._begin(device)
        try:
            yield
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise
        self._open.close()

    def cross(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Go on to another device: end the graph, add copies of tensors to fixed addresses, and begin the next graph.

        Returns the copies; their contents are undefined until the first replay.
        """
        self._open.close()
        pairs = [(x, torch.empty_like(x, device=device)) for x in tensors]
        self._parts.append(partial(copy, [*self._carried(device), *pairs]))
        self._begin(device)
        return [target for _, target in pairs]

    def replay(self) -> None:
        """Queue all graphs and copies, without waiting for any device."""
        for part in self._parts:
            part()

    def _begin(self, device: torch.device) -> None:
        self._open = ExitStack()
        self.graphs += 1
        self._parts.append(self._open.enter_context(self._opening(device)).replay)


def copy(pairs: Sequence[Pair]) -> None:
    """Queue copies of the first tensor of each pair to the second, on another device.

    The copies run on the current stream of the source's device, after the work that is queued there and on the target's
    device. Work that is queued on the target's device later waits for them.
    """
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


@contextmanager
def aside(devices: Iterable[torch.device]) -> Iterator[None]:
    """Make each GPU's capture stream (:func:`side_stream`) its current stream inside a ``with`` block.

    The work on the capture streams begins after everything that is queued on the current streams now. At the end of the
    block, the host waits for it. The first GPU becomes the current device.
    """
    streams = [side_stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in reversed(streams):
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))  # also makes its device the current one
        yield
    for stream in streams:
        stream.synchronize()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream on which graphs are captured; it is always the same one for a device.

    Kernels keep a workspace per stream, so a new stream for each capture would take more memory.
    """
    return torch.cuda.Stream(device)
