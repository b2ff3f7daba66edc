"""The session of a run: the loaded model, with a strategy for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from kvbench.cache.progress import Options
from kvbench.config.run_config import RunConfig
from kvbench.decoding.compiled import load_joined
from kvbench.decoding.drafting import prepare_draft
from kvbench.errors import ConfigError
from kvbench.models import shared
from kvbench.models.load import LoadedModel
from kvbench.profiling.device import device_name
from kvbench.results.environment import cpu_name
from kvbench.results.samples import Row
from kvbench.runner import batching
from kvbench.runner.rows import Machine, Report, Strategy
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

if TYPE_CHECKING:
    from kvbench.runner.answers import Answers
    from kvbench.runner.fidelity_samples import Comparisons
    from kvbench.runner.span_likelihood import TextSpans


class Session:
    """The loaded model of a run, and the strategies that run batches of samples with it.

    Attributes:
        device: device of the model's inputs.
        machine: names of the device and the dtype, which are copied into each row.
        report: function called with the progress of a long batch; None for no reports.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        loaded = shared.take(config.model, config.runtime, load_joined)
        prepare_draft(loaded.model, config.method.speculation)
        self._loaded: LoadedModel | None = loaded
        self.device = loaded.device
        name = device_name(loaded.device) or cpu_name()
        if len(loaded.devices) > 1:  # times of one device and of several are kept apart by this name
            name = f"{len(loaded.devices)} x {name} ({loaded.layout})"
        self.machine = Machine(name, **loaded.dtypes.names())
        self.report: Report | None = None
        self._strategies = strategies(config, loaded, self.machine)
        self._first = True

    def plan(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Return the samples in batches, in the order in which to run them (:func:`kvbench.runner.batching.plan`)."""
        size, kinds = self.config.runtime.batch_size, {type(sample.work) for sample in samples}
        for kind in (ScoreText, CompareTokens):  # these know better how many of their samples fit
            if kinds == {kind}:
                size = cast("TextSpans | Comparisons", self._strategies[kind]()).size(samples)
        return batching.plan(samples, size)

    def layout(self) -> dict[str, Any]:
        """Return the devices of the model, how the model is distributed over them, and the form of its weights.

        They are ``devices``, torch's names of all devices including those of other ranks; ``layout``, for example
        ``tensor_parallel``; ``weights``, a description of 4-bit weights, if the model has them; and ``dequantized``,
        the quantized format that its weights had before they were converted to float32, if any
        (:class:`kvbench.models.load.LoadedModel`).
        """
        assert self._loaded is not None
        layout = {"devices": list(self._loaded.devices), "layout": self._loaded.layout}
        forms = {"weights": self._loaded.weights, "dequantized": self._loaded.dequantized}
        return layout | {key: form for key, form in forms.items() if form}

    @property
    def warm(self) -> bool:
        """True if a batch has already run, so that the next batch is not a warm-up."""
        return not self._first

    def answers(self) -> Answers:
        """Return the strategy that generates answers, for a prefill that several sessions share."""
        return cast("Answers", self._strategies[Generate]())

    def close(self) -> None:
        """Release the model, so that its memory is free for the next run; the session cannot be used afterwards.

        A shared model stays loaded for the next run; everything that this run has attached to it is removed.
        """
        if self._loaded is not None:
            self.config.method.detach(self._loaded.model)
            shared.give_back(self._loaded)
        self._loaded, self._strategies = None, {}

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """Run one batch of samples with the strategy for their kind of work, and return one row per sample.

        Raises:
            ConfigError: there is no strategy for that kind of work.
            Exception: any error of :meth:`kvbench.runner.rows.Strategy.rows`.
        """
        kind = type(samples[0].work)
        if kind not in self._strategies:
            raise ConfigError(
                "dataset._target_",
                samples[0].id,
                f"declares a kind of work that the runner does not support: {kind.__name__}",
                allowed=[known.__name__ for known in self._strategies],
            )
        rows = self._strategies[kind]().rows(samples, first=self._first, report=self.report)
        self._first = False
        return rows


def strategies(config: RunConfig, loaded: LoadedModel, machine: Machine) -> dict[type[Work], Callable[[], Strategy]]:
    """Return a function for each kind of work, which imports and creates its strategy on the first call."""
    task, options = config.task, Options(kernels=config.runtime.kernels, mlp_chunk=config.runtime.mlp_chunk)

    @cache
    def answers() -> Strategy:
        from kvbench.runner.answers import Answers

        return Answers(config, loaded, task, machine, options)

    @cache
    def requests() -> Strategy:
        from kvbench.runner.two_requests import TwoRequests

        return TwoRequests(cast("Answers", answers()), task)

    @cache
    def questions() -> Strategy:
        from kvbench.runner.questions import SharedTexts

        return SharedTexts(config, loaded, task, machine, options)

    @cache
    def spans() -> Strategy:
        from kvbench.runner.span_likelihood import TextSpans

        return TextSpans(
            config.method,
            loaded,
            task,
            machine,
            options,
            rows_at_once=config.runtime.span_rows,
            batch_size=config.runtime.batch_size,
            limit_gb=config.runtime.memory_limit_gb,
            graphs=config.runtime.graphs,
            compile=config.runtime.compile,
        )

    @cache
    def comparisons() -> Strategy:
        from kvbench.runner.fidelity_samples import Comparisons

        return Comparisons(config, loaded, task, machine, options)

    @cache
    def points() -> Strategy:
        from kvbench.runner.points import Points

        return Points(config.method, config.decoding, config.runtime, loaded, task, machine, options)

    return {
        Generate: answers,
        ReasonThenAnswer: requests,
        AskQuestions: questions,
        ScoreText: spans,
        CompareTokens: comparisons,
        MeasurePoint: points,
    }
