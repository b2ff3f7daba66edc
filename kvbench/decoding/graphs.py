"""Captured decoding: a decode step recorded as a CUDA graph once, replayed for every token.

An eager step costs the host tens of milliseconds of launches whatever the GPU does; a replayed one costs what the GPU
needs. Between two replays the host settles the cache (a method's flushes are ordinary launches on the same stream) and
updates a table; it stays one step ahead, so the device does not wait for it. Tokens come back by a copy that the host
awaits one step late: where a row ends, one step too many was begun, and it is taken back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.attention.phases import NotServed
from kvbench.attention.recorded import recording
from kvbench.cache import KVCache
from kvbench.decoding import compiled
from kvbench.decoding.passes import check_cache
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.step import Recorded
from kvbench.decoding.stopping import Stopping
from kvbench.errors import CacheError
from kvbench.methods.speculation import Speculation
from kvbench.util.attachment import placement
from kvbench.util.failures import is_out_of_memory

Graphs = Literal["auto", "always", "never"]

#: steps from which on a capture, about a second, is worth its time
WORTH = 64
#: steps that the host may be ahead of the tokens that it has seen
AHEAD = 2
#: runs before a capture: kernels are compiled and work space is allocated in them
WARM_UPS = 2


class NotCaptured(Exception):
    """Error of a step that cannot be captured; its message is the reason, for the result row."""


def refuses(
    model: PreTrainedModel,
    cache: KVCache,
    graphs: Graphs,
    steps: int,
    device: torch.device,
    speculation: Speculation | None = None,
) -> str | None:
    """Return why `steps` decode steps are not to be captured, as far as known beforehand; None if they may be."""
    if graphs == "never":
        return "runtime.graphs=never"
    if device.type != "cuda":
        return f"no CUDA graphs on {device.type}"
    if steps < (WORTH if graphs == "auto" else 1):
        return f"{steps} steps: too few for a capture" if steps > 0 else "no steps"
    if cache.follower is not None and speculation is None:
        return "the cache leads another one"
    if len({p.device for p in model.parameters()}) > 1:
        return "layers on several devices"
    if placement(model).team is not None and graphs != "always":
        return "tensor parallelism, whose collectives are not recorded unless runtime.graphs=always"
    return None


class Captured:
    """A pass that has been recorded.

    Args:
        step: what is recorded.
        compile: compile everything around attention (:mod:`kvbench.decoding.compiled`).
        capture: record a CUDA graph; False: run the recorded step's code each time (for tests on a CPU).

    Attributes:
        seconds: spent on warm-ups and captures.
        captures: how many there were.
    """

    def __init__(self, step: Recorded, *, compile: bool = False, capture: bool = True) -> None:
        self.step, self.compile, self.capture = step, compile, capture
        self.seconds, self.captures, self._version = 0.0, 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def stepping(self) -> str:
        """The kind of step, for the result row: ``graph``, ``graph, compiled``, or why it is not compiled."""
        if not self.compile:
            return "graph"
        layers = compiled.decoder_layers(self.step.model)
        return "graph, compiled" if layers else "graph (not compiled: no list of decoder layers)"

    def first(self) -> None:
        """Do the bookkeeping of the first step and record it; the step itself is yet to be replayed.

        Raises:
            NotCaptured: with the cache as it was before.
            torch.OutOfMemoryError: there is no room for it.
        """
        cache, before = self.step.cache, self.step.cache.get_seq_length()
        started = time.perf_counter()
        try:
            self.step.check()
            self.step.warm()
            self.seconds += time.perf_counter() - started
            self.step.advance()
            self._record()
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            taken = cache.get_seq_length() - before
            if taken:
                cache.take_back([taken] * len(self.step.tokens))
            raise NotCaptured(reason(error)) from error

    def next(self) -> None:
        """Do the bookkeeping of the next step, and record anew if a buffer has moved or a new format has come up.

        Raises:
            CacheError: that did not succeed.
        """
        try:
            self.step.advance()
            if self.step.version != self._version:
                self._record()
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CacheError(
                f"a captured step can go on no longer: {reason(error)}. hint: runtime.graphs=never"
            ) from error

    def replay(self) -> None:
        """Queue the step that bookkeeping was done for."""
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.inference_mode(False), torch.no_grad(), recording(self.step.model, self.step.serve):
            self.step.run()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self) -> None:
        started = time.perf_counter()
        step = self.step
        self._graph = None  # its memory is free before the next capture
        if self.capture:
            stream = side_stream(step.device)
            with torch.cuda.device(step.device), recording(step.model, step.serve):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    rehearse(step)  # as it is: finds out what cannot be served before anything is compiled
                with compiled.around(step.model, self.compile, rows=step.tokens.numel()):
                    with torch.cuda.stream(stream):
                        for _ in range(WARM_UPS):
                            rehearse(step)
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        step.run()
            self._graph = graph
        self._version = step.version
        self.captures += 1
        self.seconds += time.perf_counter() - started


def rehearse(step: Recorded) -> None:
    """Run a pass and put back what it changed.

    Between any two runs, not after the last: for a step after the last one there is nothing to draw with and no place
    to write a draft to, and a GPU ends the process where an index is out of bounds.
    """
    copies = [x.clone() for x in step.changed()]
    step.run()
    for x, before in zip(step.changed(), copies, strict=True):
        x.copy_(before)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device's passes are recorded: one, as kernels keep work space for each stream."""
    return torch.cuda.Stream(device)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


class Tokens:
    """Tokens on their way from the device to the host."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._free: list[Tensor] = []
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fetch(self) -> None:
        """Ask for the tokens of the step that was queued last."""
        cuda = self.source.is_cuda
        with torch.inference_mode(False):
            room = self._free.pop() if self._free else torch.empty(self.source.shape, dtype=torch.long, pin_memory=cuda)
        room.copy_(self.source, non_blocking=True)
        event = torch.cuda.Event() if cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.source.device))
        self._waiting.append((room, event))

    def wait(self) -> list[int]:
        """Return the tokens that were asked for first, once they are here."""
        room, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        self._free.append(room)
        return [int(token) for token in room.flatten().tolist()]


def decode(captured: Captured, token: Tensor, stopping: Stopping, max_new_tokens: int) -> list[float]:
    """Continue from the first new token until every row has ended; the tokens are in `stopping`.

    Args:
        captured: after :meth:`Captured.first`.
        token: first new token of each row, ``[B]``.

    Returns:
        Seconds from one step's tokens to the next's, as the host received them.

    Raises:
        CacheError: a step could be captured no longer.
        NonFiniteError: the method packed NaN or Inf; one or two steps late.
    """
    step, total = captured.step, max_new_tokens - 1
    cache = step.cache
    width = cache.get_seq_length() - 1  # the first step's token is held already
    stopping.take(token.tolist())
    tokens, steps, begun = Tokens(step.tokens), [], 0
    last = time.perf_counter()
    while True:
        while begun < total and len(tokens) < AHEAD and not stopping.all_ended:
            if begun:
                before = captured.seconds
                captured.next()
                last += captured.seconds - before  # recording is in no step's time
            captured.replay()
            tokens.fetch()
            begun += 1
        if not len(tokens):
            break
        fresh = tokens.wait()
        now = time.perf_counter()
        if not stopping.all_ended:
            steps.append(now - last)
            stopping.take(fresh)
        last = now
    excess = begun - len(steps) if begun else 1
    if excess:
        cache.take_back([excess] * len(step.tokens))
    check_cache(cache, width + len(steps))
    return steps


def uniforms(sampling: Sampling, generators: Sequence[torch.Generator], steps: int) -> Tensor | None:
    """Return the numbers that `steps` tokens of each row are drawn with, fp32 ``[steps, B]``; None if greedy."""
    if sampling.temperature == 0.0:
        return None
    return torch.stack([torch.cat([torch.rand(1, generator=g) for g in generators]) for _ in range(steps)])
