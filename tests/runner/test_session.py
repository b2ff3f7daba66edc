"""The session: names of device and dtype, one strategy for each kind of work, the first batch, and the release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.errors import ConfigError
from kvbench.models.arithmetic import Dtypes
from kvbench.results.environment import cpu_name
from kvbench.runner import session as module
from kvbench.runner.answers import Answers
from kvbench.runner.fidelity_samples import Comparisons
from kvbench.runner.points import Points
from kvbench.runner.questions import SharedTexts
from kvbench.runner.rows import Machine
from kvbench.runner.session import Session, strategies
from kvbench.runner.span_likelihood import TextSpans
from kvbench.runner.two_requests import TwoRequests
from kvbench.tasks.base import Sample
from kvbench.tasks.work import (
    AskQuestions,
    CompareTokens,
    Generate,
    MeasurePoint,
    ReasonThenAnswer,
    ScoreText,
    Work,
)
from tests.run_support import ToyTask

KINDS = (Generate, ReasonThenAnswer, AskQuestions, ScoreText, CompareTokens, MeasurePoint)


class Method:
    speculation = "the method's speculation"

    def __init__(self) -> None:
        self.detached: list[Any] = []

    def detach(self, model: Any) -> None:
        self.detached.append(model)


@pytest.fixture
def opened(monkeypatch):
    """Return a function that opens a session on devices that are made up, and what was prepared meanwhile."""
    prepared: list[tuple[Any, Any]] = []
    loads: list[tuple[Any, Any]] = []

    def open_(devices: tuple[str, ...] = ("cpu",), device: str = "cpu", weights: Any = None) -> Any:
        loaded = SimpleNamespace(
            model="the model",
            device=torch.device(device),
            devices=devices,
            dtypes=Dtypes(torch.bfloat16, torch.float16, torch.float32),
            layout="device_map",
            weights=weights,
            dequantized=None,
        )

        def load(*args: Any) -> Any:
            loads.append(args)
            return loaded

        monkeypatch.setattr(module, "load_joined", load)
        monkeypatch.setattr(module, "prepare_draft", lambda *args: prepared.append(args))
        monkeypatch.setattr(module, "device_name", lambda at: "A GPU" if at.type == "cuda" else None)
        config: Any = SimpleNamespace(
            task=ToyTask(),
            model="toy",
            method=Method(),
            decoding="decoding",
            runtime=SimpleNamespace(
                kernels="reference",
                mlp_chunk=64,
                batch_size=2,
                span_rows="auto",
                memory_limit_gb=9.0,
                graphs="never",
                compile=True,
            ),
        )
        return Session(config), config, prepared, loads

    return open_


def test_the_machine_is_named_after_its_devices(opened) -> None:
    session, config, prepared, loads = opened()
    assert session.machine == Machine(cpu_name(), "bfloat16", "float32", "float16")
    assert session.device == torch.device("cpu") and session.report is None
    assert loads == [("toy", config.runtime)] and prepared == [("the model", "the method's speculation")]
    assert opened(("cuda:0",), "cuda")[0].machine.device == "A GPU"
    session, *_ = opened(("cuda:0", "cuda:1"), "cuda")
    assert session.machine.device == "2 x A GPU (device_map)"
    assert session.layout() == {"devices": ["cuda:0", "cuda:1"], "layout": "device_map"}
    form = {"source": "awq", "bits": 4, "groups": [128], "head": False, "bytes": 7}
    session, *_ = opened(weights=form)
    assert session.layout()["weights"] == form


def sample(name: str, work: Work | None = None) -> Sample:
    return Sample(name, "t", prompt=name * 3, answers=(), max_new_tokens=1, work=work or Generate())


def test_batches_are_of_the_runs_size(opened) -> None:
    session, *_ = opened()
    plan = session.plan([sample(name) for name in "abc"])
    assert [[one.id for one in batch] for batch in plan] == [["a", "b"], ["c"]]


def test_batches_of_spans_have_a_size_of_their_own(opened) -> None:
    session, config, *_ = opened()
    work = ScoreText(tuple(range(9)), 1, 9, 0, "decode", 0, "auto")
    spans = [sample(name, work) for name in "abc"]
    assert [len(batch) for batch in session.plan(spans)] == [2, 1]
    config.runtime.span_rows = 3
    again = strategies(config, session._loaded, session.machine)
    session._strategies = again
    assert [len(batch) for batch in session.plan(spans)] == [3]
    assert [len(batch) for batch in session.plan([sample(name) for name in "abc"])] == [2, 1]


def test_each_kind_of_work_has_its_strategy(opened) -> None:
    _, config, *_ = opened()
    config.task = "task"
    made = strategies(config, "loaded", "machine")  # type: ignore[arg-type]
    by_kind: Any = {kind: make() for kind, make in made.items()}
    kinds: dict[Any, Any] = {Generate: Answers, AskQuestions: SharedTexts, ScoreText: TextSpans}
    kinds |= {CompareTokens: Comparisons, MeasurePoint: Points, ReasonThenAnswer: TwoRequests}
    assert {kind: type(strategy) for kind, strategy in by_kind.items()} == kinds
    assert all(make() is by_kind[kind] for kind, make in made.items())
    twice = by_kind.pop(ReasonThenAnswer)
    assert (twice.answers, twice.task) == (by_kind[Generate], "task")
    for strategy in by_kind.values():
        assert (strategy.loaded, strategy.task, strategy.machine) == ("loaded", "task", "machine")
        assert strategy.options == Options(kernels="reference", mlp_chunk=64)
    assert by_kind[Generate].config is by_kind[AskQuestions].config is config
    text = by_kind[ScoreText]
    assert (text.rows_at_once, text.batch_size, text.limit_gb, text.graphs) == ("auto", 2, 9.0, "never")
    assert text.compile is True
    assert by_kind[ScoreText].method is by_kind[MeasurePoint].method is config.method
    assert (by_kind[MeasurePoint].decoding, by_kind[MeasurePoint].runtime) == ("decoding", config.runtime)


def test_only_the_first_batch_is_the_first_and_progress_is_passed_on(opened, monkeypatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def rows(samples: Any, *, first: bool, report: Any) -> Any:
        calls.append(([one.id for one in samples], first, report))
        return ["row"]

    monkeypatch.setattr(module, "strategies", lambda *_: {Generate: lambda: SimpleNamespace(rows=rows)})
    session, *_ = opened()
    assert session.rows([sample("a"), sample("b")]) == ["row"]
    session.report = report = lambda share, line: None
    session.rows([sample("c")])
    assert calls == [(["a", "b"], True, None), (["c"], False, report)]


def test_a_batch_that_failed_was_not_the_first(opened, monkeypatch) -> None:
    """The next batch still warms up: nothing has been measured."""
    firsts: list[bool] = []

    def rows(samples: Any, *, first: bool, report: Any) -> Any:
        firsts.append(first)
        if samples[0].id == "bad":
            raise ValueError("a bad record")
        return ["row"]

    monkeypatch.setattr(module, "strategies", lambda *_: {Generate: lambda: SimpleNamespace(rows=rows)})
    session, *_ = opened()
    with pytest.raises(ValueError, match="a bad record"):
        session.rows([sample("bad")])
    session.rows([sample("a")])
    session.rows([sample("b")])
    assert firsts == [True, True, False]


def test_unknown_work_is_refused_and_the_known_kinds_are_named(opened) -> None:
    class Juggle(Work):
        """A kind of work that nobody runs."""

    session, *_ = opened()
    with pytest.raises(
        ConfigError, match="a: declares a kind of work that the runner does not support: Juggle"
    ) as error:
        session.rows([sample("a", Juggle())])
    assert error.value.allowed == [kind.__name__ for kind in KINDS]


def test_a_closed_session_gives_the_model_back_once(opened) -> None:
    session, config, *_ = opened()
    session.close()
    session.close()
    assert config.method.detached == ["the model"]
    with pytest.raises(ConfigError):
        session.rows([sample("a")])
