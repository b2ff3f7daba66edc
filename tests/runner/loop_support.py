"""A session and a logger that are made up, for tests of the loop of a run without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from kvbench import loggers
from kvbench.results.samples import MEASURED
from kvbench.runner import batching, ranks, sources
from kvbench.runner.rows import Machine, head
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample
from tests.run_support import ToyTask

CODE = {"method": "m" * 12, "scorer": "s" * 12, "kernels": "k" * 12}


class Session:
    """A session that writes rows without generating; `fails` maps ids of samples to errors."""

    device = torch.device("cpu")
    machine = Machine("a cpu", "float32")
    batches: ClassVar[list[list[str]]] = []
    fails: ClassVar[dict[str, BaseException]] = {}
    report: Any = None

    def layout(self) -> dict[str, Any]:
        return {"devices": ["cpu"], "layout": "one device"}

    def plan(self, samples: list[Sample]) -> list[list[Sample]]:
        return batching.plan(samples, 2)

    def rows(self, samples: list[Sample]) -> list[dict[str, Any]]:
        assert self.report is not None
        self.batches.append([sample.id for sample in samples])
        for sample in samples:
            if sample.id in self.fails:
                raise self.fails[sample.id]
        parts = {"total": 10, "codes": 6, "scales": 1, "window": 3, "index": 0}
        bill = {"used": parts, "reserved": parts, "fp16_equivalent": 40}
        attention = {"reads_packed": True, "path": "reference"}
        peaks = {"prefill": 7, "decode": 5, "kind": "cpu_live_tensors", "rss": 10**8}
        return [
            {
                **head(sample, 20, "length", prediction="ab", tokens=(1, 2)),
                **scored(ToyTask(), sample, "ab"),
                "nll": None,
                "kv_bytes": bill,
                **({"warm_up": True} if sample.warm_up else {}),
                MEASURED: self.machine.measured(len(samples), peaks, attention, ttft_s=0.5, step_s=[0.25], decoded=1),
            }
            for sample in samples
        ]


class Recorder(loggers.Logger):
    """A logger that keeps what it is sent."""

    def __init__(self, place: str | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.place = place

    def begin(self, rows: Any) -> None:
        self.calls.append(("begin", list(rows)))

    def sample(self, row: Any) -> None:
        self.calls.append(("sample", row))

    def finish(self, metrics: Any) -> None:
        self.calls.append(("finish", metrics))

    def destination(self) -> str | None:
        return self.place

    def of(self, name: str) -> list[Any]:
        return [content for kind, content in self.calls if kind == name]


@pytest.fixture
def logger(monkeypatch) -> Iterator[Recorder]:
    """Runs with a session that is made up; what they send to their logger."""
    recorder = Recorder()
    Session.batches.clear()
    Session.fails.clear()

    @contextmanager
    def opened(*_: Any) -> Iterator[Session]:
        yield Session()

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody pulls the plug here
    monkeypatch.setattr(ranks, "open_session", opened)
    monkeypatch.setattr(loggers, "load_logger", lambda *args: recorder)
    monkeypatch.setattr(sources, "code", lambda config: dict(CODE))
    yield recorder
    Session.batches.clear()
    Session.fails.clear()
