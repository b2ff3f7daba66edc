"""Samples and tasks: what a benchmark gives to the runner, and the defaults of everything that it may leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from kvbench.errors import ConfigError, KvbenchError
from kvbench.tasks.data import HubSource
from kvbench.tasks.work import AskQuestions, Generate, Work
from kvbench.util.requirements import Package

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """Rules by which a sample's prompt becomes tokens.

    Args:
        chat: False: the model's chat wrapper is left out.
        system: text of a system turn where the wrapper is the tokenizer's own template.
        limit: most tokens of the prompt, in place of ``model.prompt_limit``; ``fill``: all that the model leaves
            for it.
        limits: `limit` by name of the model or of its preset, before `limit`.
        ids: the prompt in token ids, used as they are.
        ids_context: half-open token range of the context in `ids`.
    """

    chat: bool = True
    system: str | None = None
    limit: int | Literal["fill"] | None = None
    limits: Mapping[str, int | Literal["fill"]] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    ids_context: tuple[int, int] | None = None


@dataclass(frozen=True)
class Sample:
    """One prompt with everything that a method, the decoder and the scorer need to know about it.

    Spans are half-open character ranges of `prompt`; the runner turns them into token spans with the tokenizer's
    offsets (after any chat wrapper and truncation).

    Args:
        id: stable and unique within the data set, for example ``needle@2048/17``; results are keyed by it.
        task: name of the task, for example ``needle``.
        length: nominal length in tokens where the task has lengths, else None; scores are keyed ``task@length`` then.
        prompt: the whole prompt as text, before any chat wrapper.
        context_span: what the template's ``{context}`` produced; None where the task has no such border.
        query: the question's text (what Cocktail searches with); may be empty.
        query_source: what stands for an empty query, for example ``last_chunk``; None: the method's choice.
        answers: reference answers; the score is taken over them as the metric says.
        target: the first reference as it follows the prompt (with its leading space, for example); None: the first of
            `answers` itself.
        answer_ids: the first reference in token ids, in place of `target`.
        max_new_tokens: limit on generated tokens.
        stop: strings at which the generation ends (not part of the prediction).
        end_text: text whose last token ends the answer.
        say_something: the first generated token cannot end the answer.
        truncation: ``middle`` cuts a prompt that is too long in its middle (counted in the row), ``longbench`` does so
            by LongBench's rule (before the chat wrapper, by decoding the halves), ``refuse`` raises.
        rules: how the prompt becomes tokens.
        work: kind of work that the sample asks for.
        warm_up: run before the others; its row counts for peak memory alone.
        meta: JSON data for the scorer and for analyses alone; the runner never reads it.
    """

    id: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    length: int | None = None
    context_span: tuple[int, int] | None = None
    query: str = ""
    query_source: str | None = None
    target: str | None = None
    answer_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    end_text: str | None = None
    say_something: bool = False
    truncation: str = "middle"
    rules: PromptRules = field(default_factory=PromptRules)
    work: Work = field(default_factory=Generate)
    warm_up: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def score_key(self) -> str:
        """Key of the sample's score in ``metrics.json``: ``task`` or ``task@length``."""
        return self.task if self.length is None else f"{self.task}@{self.length}"

    @property
    def continuation(self) -> str:
        """Text of the first reference as it follows the prompt; empty where there is none."""
        if self.target is not None:
            return self.target
        return self.answers[0] if self.answers else ""


class Setup(Protocol):
    """Parts of a run that a task may look at (:class:`kvbench.config.run_config.RunConfig`)."""

    @property
    def model(self) -> Any:
        """``max_length``, ``prompt_limit``, ``weights`` and names of the model."""
        ...

    @property
    def method(self) -> Any:
        """The method, for text spans that would not measure it."""
        ...

    @property
    def decoding(self) -> Any:
        """``max_new_tokens``, ``stop`` and how tokens are drawn."""
        ...

    @property
    def runtime(self) -> Any:
        """``batch_size`` and where the run takes place."""
        ...


class Task:
    """Base class of data sets. A subclass is a dataclass, whose fields are the keys of the `dataset` group.

    Required are :meth:`samples`, :meth:`identity` and :meth:`score`; everything else has a default here. A task knows
    nothing of models or caches; :func:`kvbench.tasks.load` makes one from its configuration.
    """

    #: raised when the samples or their prompts change: part of the run's identity
    version: int = 1
    #: raised when scoring changes: outside the run's identity, so that old predictions are re-scored
    scorer_version: int = 1
    #: True if samples are made of the model's tokens: :meth:`bind` is called before :meth:`samples`
    needs_tokenizer: ClassVar[bool] = False
    #: True if later samples depend on earlier rows: :meth:`next_samples` is called again after every row
    adaptive: ClassVar[bool] = False
    #: True if a run must not be spread over several processes
    single_process: ClassVar[bool] = False

    def samples(self) -> Iterator[Sample]:
        """Yield all samples within the configured limit, in a fixed order."""
        raise NotImplementedError(f"{type(self).__name__}.samples")

    def identity(self) -> dict[str, Any]:
        """Return JSON data that determines the samples but for how many there are (hashed into the run id)."""
        raise NotImplementedError(f"{type(self).__name__}.identity")

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return ``{"score": 0..1, ...}``; further keys are variants (for example ``strict``, ``flexible``)."""
        raise NotImplementedError(f"{type(self).__name__}.score")

    def score_questions(self, sample: Sample, predictions: Sequence[str]) -> dict[str, float]:
        """Score the answers to all questions of a sample whose work is :class:`AskQuestions`.

        Returns:
            ``score``: the mean over the questions, each scored as a sample of its own; ``all``: 1.0 if every one is
            right.

        Raises:
            ValueError: there are not as many predictions as questions.
        """
        assert isinstance(sample.work, AskQuestions)
        scores = [
            self.score(replace(sample, answers=(question.answer,), meta=question.meta), prediction)["score"]
            for question, prediction in zip(sample.work.questions, predictions, strict=True)
        ]
        return {"score": sum(scores) / len(scores), "all": float(all(score == 1.0 for score in scores))}

    def next_samples(self, rows: Mapping[str, Row]) -> Iterator[Sample]:
        """Yield the samples that are known given the rows so far, by sample id; those with rows are among them."""
        return self.samples()

    def check(self) -> None:
        """Raise ConfigError for settings that make no sense by themselves."""

    def fits(self, config: Setup) -> None:
        """Raise ConfigError where the rest of the configuration cannot run this data set."""

    def packages(self) -> tuple[Package, ...]:
        """Return the optional packages that the settings need."""
        return ()

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield what has to be fetched: a source on the hub, and the part of it."""
        return iter(())

    def bind(self, tokenizer: Any) -> None:
        """Receive the model's tokenizer; called before :meth:`samples` where :attr:`needs_tokenizer` is set."""

    def notes(self) -> dict[str, Any]:
        """Return facts about the data that a result records in addition to the identity."""
        return {}

    def machine_identity(self, runtime: Any, device: Callable[[], str]) -> dict[str, Any] | None:
        """Return what of the machine and the runtime group makes another run; None: scores do not depend on it.

        Args:
            runtime: the `runtime` group.
            device: gives the device's name; imports torch.
        """
        return None


class TokenTask(Task):
    """Base class of data sets whose samples are made of the model's tokens."""

    needs_tokenizer = True
    _tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        """Receive the model's tokenizer."""
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises KvbenchError before :meth:`bind`."""
        if self._tokenizer is None:
            raise KvbenchError(f"{type(self).__name__}: samples are made of tokens: call bind(tokenizer) first")
        return self._tokenizer


def check_shots(shots: int, train: Sequence[Any], place: object) -> None:
    """Raise ConfigError where there are fewer examples than `shots`; `place` is where they were read."""
    if len(train) < shots:
        raise ConfigError(
            "dataset.shots",
            shots,
            f"is more than the {len(train)} records of {place}",
            hint=f"dataset.shots={len(train)} at most, or the whole train split",
        )
