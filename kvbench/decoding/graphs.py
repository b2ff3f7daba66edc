"""Captured decoding: a decode step is recorded once as a CUDA graph and replayed for every token.

In an eager step the host spends tens of milliseconds on kernel launches, however short the GPU's work is. A replayed
step takes only the GPU's time. Between two replays the host lets the method pack or drop tokens (by ordinary launches
on the same stream) and updates a table. It stays one step ahead, so that the device never waits: it reads the tokens of
a step only after queueing the next step. When the last row ends, one step too many has therefore been started and is
rolled back.

If the model's layers lie on several GPUs, there is one graph for each run of layers on one of them, and hidden states
are copied from one to the next (:mod:`kvbench.decoding.segments`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.phases import NotServed
from kvbench.decoding import compiled
from kvbench.decoding.passes import check_cache
from kvbench.decoding.recordable import NotCaptured
from kvbench.decoding.recorded import Recorded
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.decoding.segments import Segments, aside
from kvbench.errors import CacheError
from kvbench.util.failures import is_out_of_memory


class Tokens:
    """Queue of asynchronous copies that bring the tokens of each step from the device to the host.

    The tensor `source` on the device has the newest tokens; every step overwrites it.
    """

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._free: list[Tensor] = []
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fetch(self) -> None:
        """Start copying the newest tokens to the host, after the step that was queued last, without waiting for it."""
        cuda = self.source.is_cuda
        with torch.inference_mode(False):
            room = self._free.pop() if self._free else torch.empty(self.source.shape, dtype=torch.long, pin_memory=cuda)
        room.copy_(self.source, non_blocking=True)
        event = torch.cuda.Event() if cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self.source.device))
        self._waiting.append((room, event))

    def wait(self) -> list[int]:
        """Wait until the oldest copy has arrived on the host, and return its tokens, one per row."""
        room, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        self._free.append(room)
        return [int(token) for token in room.flatten().tolist()]


#: largest number of steps that are queued before the host has seen their tokens
AHEAD = 2
#: runs before a capture, in which kernels are compiled and workspaces allocated
WARM_UPS = 2


class Captured:
    """A forward pass captured as a CUDA graph, with methods to replay it step by step.

    Call :meth:`first` and :meth:`replay` for the first step, then :meth:`next` and :meth:`replay` for each further
    step.

    Args:
        capture: True: capture a CUDA graph; False: run the code of the pass at each replay (for tests on a CPU).
        drafting: True: the pass drafts tokens, with the draft's weights if it has its own.

    Attributes:
        seconds: seconds spent on warm-ups and captures.
        captures: number of captures so far.
    """

    def __init__(self, step: Recorded, *, compile: bool = False, capture: bool = True, drafting: bool = False) -> None:
        self.step, self.compile, self.capture, self.drafting = step, compile, capture, drafting
        self.seconds, self.captures, self._version = 0.0, 0, 0
        self._segments: Segments | None = None
        self._read: list[Callable[..., Any]] = []  # holds tensors at addresses that the graph reads

    @property
    def stepping(self) -> str:
        """The form of the steps in results: ``graph``, ``graph, compiled`` or ``graph (not compiled: REASON)``.

        If layers lie on several devices, the text begins with ``graph in 3 parts``, for example.
        """
        parts = 1 if self._segments is None else self._segments.graphs
        how = "graph" if parts == 1 else f"graph in {parts} parts"
        if not self.compile:
            return how
        layers = compiled.decoder_layers(self.step.model)
        return f"{how}, compiled" if layers else f"{how} (not compiled: no list of decoder layers)"

    def first(self) -> None:
        """Prepare the cache for the first step and capture the pass; call :meth:`replay` to run the step.

        Raises:
            NotCaptured: the pass cannot be captured; the cache holds the same tokens as before.
            torch.OutOfMemoryError: there is not enough memory for the capture.
        """
        cache, before = self.step.cache, self.step.cache.get_seq_length()
        started = time.perf_counter()
        try:
            self.step.check()
            self.step.warm()
            self.seconds += time.perf_counter() - started
            self.step.advance()
            self.record()
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reserved = cache.get_seq_length() - before
            if reserved:
                cache.take_back([reserved] * len(self.step.tokens))
            raise NotCaptured(reason(error)) from error

    def next(self) -> None:
        """Prepare the cache for the next step; call :meth:`replay` to run the step.

        If a buffer of the cache has been reallocated, or the cache now contains tokens in an additional format, the old
        graph is invalid and the pass is captured again.

        Raises:
            CacheError: the pass can no longer be captured.
        """
        try:
            self.step.advance()
            if self.step.version != self._version:
                self.record()
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CacheError(
                f"decoding by CUDA graph stopped, because the next step cannot be captured: {reason(error)}.\n"
                "  hint: set runtime.graphs=never"
            ) from error

    def replay(self) -> None:
        """Queue the prepared step on the device, without waiting for its result."""
        if self._segments is not None:
            self._segments.replay()
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            self.step.recording(),
        ):
            self.step.run()

    @torch.inference_mode(False)
    @torch.no_grad()
    def record(self) -> None:
        """Capture the pass with the cache's present buffers, for which :meth:`Recorded.build` must have been called.

        Raises:
            NotServed: a layer cannot be served by a recorded pass.
        """
        started = time.perf_counter()
        step = self.step
        self._segments, self._read = None, []  # frees their memory before the next capture
        if self.capture:
            with step.recording():
                with aside(step.devices):
                    rehearse(step)  # without compilation first, which finds what cannot be served
                rows = step.tokens.numel()
                with compiled.around(step.model, self.compile, rows, self.drafting) as self._read:
                    with aside(step.devices):
                        for _ in range(WARM_UPS):
                            rehearse(step)
                    segments = Segments(step.carried)
                    with segments.recording(step.device), step.crossing(segments.cross):
                        step.run()
            self._segments = segments
        self._version = step.version
        self.captures += 1
        self.seconds += time.perf_counter() - started


def rehearse(step: Recorded) -> None:
    """Run a forward pass as a warm-up, and afterwards restore the inputs that it changed.

    Each pass advances the index of the step. If this were not undone, warm-ups would move it past the last step, and
    later passes would read or write out of bounds, which on a GPU ends the process.
    """
    copies = [x.clone() for x in step.changed()]
    step.pretend()
    step.run()
    for x, before in zip(step.changed(), copies, strict=True):
        x.copy_(before)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters; its class name if it has no message."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def decode_captured(captured: Captured, token: Tensor, stopping: Stopping, max_new_tokens: int) -> list[float]:
    """Decode by replays of a captured step until every row has ended, and return the time of each step.

    Call :meth:`Captured.first` before. `token` is the first new token of each row, ``[B]``.

    Returns:
        For each step, seconds on the host between the arrival of the previous step's tokens and of its own.

    Raises:
        CacheError: a later step could not be captured again, or the model did not use the cache.
        NonFiniteError: the method packed NaN or Inf. The error is raised one or two steps after that.
    """
    step, total = captured.step, max_new_tokens - 1  # the prefill has chosen the first new token
    cache = step.cache
    width = cache.get_seq_length() - 1  # Captured.first has already added the first step's token
    stopping.take(token.tolist())
    tokens, times, begun = Tokens(step.tokens), [], 0
    last = time.perf_counter()
    while True:
        # one step is queued before the host reads the tokens of the one before, so that the device never waits
        while begun < total and len(tokens) < AHEAD and not stopping.all_ended:
            if begun:
                before = captured.seconds
                captured.next()
                last += captured.seconds - before  # captures do not count as time of a step
            captured.replay()
            tokens.fetch()
            begun += 1
        if not len(tokens):
            break
        fresh = tokens.wait()
        now = time.perf_counter()
        if not stopping.all_ended:
            times.append(now - last)
            stopping.take(fresh)
        last = now
    # steps that were started after the last row had ended; Captured.first has taken up a token even if no step was run
    excess = begun - len(times) if begun else 1
    if excess:
        cache.take_back([excess] * len(step.tokens))
    check_cache(cache, width + len(times))
    return times


def draw_step_uniforms(sampling: Sampling, generators: Sequence[torch.Generator], steps: int) -> Tensor | None:
    """Draw all random numbers for the tokens of `steps` steps, fp32 ``[steps, B]`` in [0, 1); None if greedy."""
    if sampling.temperature == 0.0:
        return None
    return torch.stack([torch.cat([torch.rand(1, generator=g) for g in generators]) for _ in range(steps)])
