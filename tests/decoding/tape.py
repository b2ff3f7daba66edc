"""A stand-in for CUDA graphs on a CPU: operations are recorded with their tensors, and replayed into the same memory.

As in a CUDA graph, numbers that Python knows are frozen, and nothing that happens between operations is repeated. A
recording, unlike a capture, also runs the operations, so the inputs of a pass are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.attention import fused, phases
from kvbench.decoding import graphs, recorded, round_passes
from kvbench.decoding.segments import Segments
from tests.decoding.recorded_oracle import Oracle, part


class Tape(TorchDispatchMode):
    """One graph."""

    open: Tape | None = None

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, tensors(out)))
        return out

    def replay(self) -> None:
        for function, args, kwargs, outputs in self.calls:
            for output, fresh in zip(outputs, tensors(function(*args, **kwargs)), strict=True):
                if fresh.data_ptr() != output.data_ptr():  # neither a view nor changed in place
                    output.copy_(fresh)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def tape_on(device: torch.device) -> Iterator[Tape]:
    """:func:`kvbench.decoding.segments.graph_on` without a GPU."""
    assert Tape.open is None, "two graphs are recorded at once"
    try:
        with Tape(device) as Tape.open:
            yield Tape.open
    finally:
        Tape.open = None


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """One call on the tape, which reads device memory whenever it is replayed, as a kernel does."""

    def called(*args: Any) -> Any:
        tape = Tape.open
        if tape is None:
            return function(*args)
        with torch.utils._python_dispatch._disable_current_modes():
            return tape.call(function, args, {})

    return called


class Taped(Segments):
    """Segments on tapes; a recording leaves the inputs of the pass as they were."""

    def __init__(self, carried: Any) -> None:
        super().__init__(carried, tape_on)
        self.step = carried.__self__

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        before = [x.clone() for x in self.step.changed()]
        self.step.pretend()
        with super().recording(device):
            yield
        for x, value in zip(self.step.changed(), before, strict=True):
            x.copy_(value)


class Kernel:
    attend = staticmethod(opaque(Oracle.attend))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture passes on tapes, with the oracle as their kernel."""
    monkeypatch.setattr(phases, "describe_part", part)
    monkeypatch.setattr(fused, "pick", lambda query, work, wanted: ("oracle", Kernel))
    monkeypatch.setattr(graphs, "Segments", Taped)
    monkeypatch.setattr(graphs, "aside", lambda devices: nullcontext())
    for module in (recorded, round_passes):
        monkeypatch.setattr(module, "append", opaque(module.append))
