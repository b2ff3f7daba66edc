"""Worker processes that make batches ahead of the trainer, in an order that does not depend on their speed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
Make = Callable[[int, float], Batch]


def _work(make: Make, first: int, step: int, ahead: Any, progress: Any, steps: int | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    index = first
    while True:
        ahead.put((index, make(index, index / steps if steps else progress.value)))
        index += step


class Feed:
    """Batches by number, from forked workers; worker `w` of `W` makes every `W`-th.

    Start it before anything touches a GPU: a forked process must not inherit a CUDA context.

    Args:
        make: batch number and progress in [0, 1] to a batch.
        workers: processes.
        start: number of the first batch.
        steps: the length of the training in steps, or None where :meth:`tell` says how far it is.
    """

    def __init__(self, make: Make, workers: int, start: int = 0, steps: int | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._next, self._workers = start, workers
        self._progress: Any = context.Value(ctypes.c_double, 0.0, lock=False)
        self._queues = [context.Queue(maxsize=3) for _ in range(workers)]
        self._processes = []
        for worker in range(workers):
            first = start + (worker - start) % workers
            arguments = (make, first, workers, self._queues[first % workers], self._progress, steps)
            process = context.Process(target=_work, args=arguments, daemon=True)
            self._processes.append(process)

    def __enter__(self) -> Feed:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def tell(self, progress: float) -> None:
        """Set the progress of the training, for batches that are yet to be made."""
        self._progress.value = progress

    def next(self) -> Batch:
        """Return the next batch.

        Raises:
            RuntimeError: its worker has died.
        """
        worker = self._next % self._workers
        while True:
            try:
                index, batch = self._queues[worker].get(timeout=20)
                break
            except queue.Empty:
                if not self._processes[worker].is_alive() and not any(p.is_alive() for p in self._processes):
                    raise RuntimeError(
                        "the processes that make training rows have failed; see their messages"
                    ) from None
                if any(p.exitcode for p in self._processes):
                    raise RuntimeError("a process that makes training rows has failed; see its message") from None
        assert index == self._next
        self._next += 1
        return batch
