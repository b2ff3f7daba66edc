"""Base classes of data sets. A data set (task) yields samples for the runner and scores the answers.

An overriding method is documented where it does more than the method of the base class. The identity of a task leaves
out `limit`, so that a finished run can be extended by more samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from kvbench.errors import ConfigError, KvbenchError
from kvbench.tasks.data import HubSource
from kvbench.tasks.work import AskQuestions, Generate, Work
from kvbench.util.requirements import Package

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """Rules for turning a sample's prompt into token ids.

    Args:
        system: text of a system turn; it is used only if the chat wrapper is the tokenizer's own template.
        history: earlier turns of the conversation, each a role (``user`` or ``assistant``) and a text; the sample's
            prompt is the user's turn after them.
        limit: maximum number of prompt tokens. ``fill`` allows as many as fit into ``model.max_length`` together with
            the answer. None applies ``model.prompt_limit``.
        limits: limits for particular models, keyed by the name of the model or of its preset; they override `limit`.
        ids: token ids of the whole prompt, used unchanged; None to tokenize its text.
        ids_context: half-open token range of the context in `ids`; None if the sample has no context.
    """

    chat: bool = True
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()
    limit: int | Literal["fill"] | None = None
    limits: Mapping[str, int | Literal["fill"]] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    ids_context: tuple[int, int] | None = None


@dataclass(frozen=True)
class Sample:
    """One prompt with everything that the method, the decoder and the scorer need to know about it.

    The runner converts the character range of the context to a token range, after adding the chat wrapper and
    truncating the prompt.

    Args:
        id: unique name within the data set, the same in every run, for example ``needle@2048/17``. Results are stored
            by it.
        length: nominal length in tokens if the task is run at several lengths; each length then has its own score,
            ``task@length``. None for other tasks.
        prompt: the whole prompt as text, without a chat wrapper.
        context_span: half-open character range of the context (the documents, without the question) in `prompt`; None
            if the prompt is not divided into context and question.
        query: text of the question, with which Cocktail searches the context; may be empty.
        query_source: what to search with if `query` is empty, for example ``last_chunk`` for the last chunk of the
            context; None for the method's default.
        answers: reference answers; the metric decides how to use several of them.
        target: the first reference answer exactly as it would follow the prompt, for example with a leading space; None
            if it would follow unchanged.
        answer_ids: token ids of the first reference answer; None to tokenize its text.
        stop: strings at which generation ends; they are not part of the answer.
        end_text: text whose last token ends the answer, in addition to the model's end-of-sequence tokens.
        say_something: True to prevent empty answers: the first token may then not be one that ends the answer.
        truncation: treatment of a prompt that is too long. ``middle`` removes tokens from the middle of the prompt.
            ``longbench`` also does so, but as LongBench does: before the chat wrapper is added, and by decoding the
            remaining tokens to text. ``refuse`` raises an error. ``leave_out`` leaves the sample out of the run if the
            model does not hold the prompt with the reference answer; an answer may then take what is left.
        work: what the runner does with the sample, for example generate an answer or measure the likelihood of a text.
        warm_up: True for a sample that only warms up the device; only its peak memory appears in the results.
        problem: name of the problem, if the sample is one of several answers to it; errors of scores are then by
            problem. None for a sample of its own.
        private: True if neither prompt nor answer may be stored or shown in plain text.
        meta: JSON data for the scorer and for analyses; the runner never reads it.
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
    problem: str | None = None
    private: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def score_key(self) -> str:
        """Key in `metrics.json` of the score that this sample is averaged into: ``task`` or ``task@length``."""
        return self.task if self.length is None else f"{self.task}@{self.length}"

    @property
    def continuation(self) -> str:
        """Text of the first reference answer as it would follow the prompt; empty if the sample has none."""
        if self.target is not None:
            return self.target
        return self.answers[0] if self.answers else ""


class Setup(Protocol):
    """The parts of a run's configuration that a task may read (:class:`kvbench.config.run_config.RunConfig`)."""

    @property
    def model(self) -> Any:
        """The model's configuration, including its names, ``max_length``, ``prompt_limit`` and ``weights``."""
        ...

    @property
    def method(self) -> Any:
        """The method. Perplexity tasks ask it whether it works in the mode in which they measure."""
        ...

    @property
    def decoding(self) -> Any:
        """The options of decoding: ``max_new_tokens``, ``stop`` and the options of sampling."""
        ...

    @property
    def runtime(self) -> Any:
        """The options of the runtime, such as ``batch_size`` and the device."""
        ...


class Task:
    """Base class of data sets.

    A subclass is a dataclass whose fields are the options of the configuration group `dataset`. It must define
    :meth:`samples`, :meth:`identity` and :meth:`score`; all other methods have defaults here. A task does not depend on
    models or caches. :func:`kvbench.tasks.load` constructs a task from its configuration.

    Args:
        name: the data set's name in results.
        source: the data set's files on the hub.
        max_new_tokens: maximum number of tokens to generate.
    """

    #: incremented when the samples or their prompts change; part of the run's identity
    version: int = 1
    #: incremented when scoring changes; not part of the run's identity, so stored predictions are scored again
    scorer_version: int = 1
    #: True if samples are made of the model's tokens; :meth:`bind` is then called before :meth:`samples`
    needs_tokenizer: ClassVar[bool] = False
    #: True if later samples depend on earlier rows; :meth:`next_samples` is then called again after every row
    adaptive: ClassVar[bool] = False
    #: True if a run must not be spread over several processes
    single_process: ClassVar[bool] = False
    #: True if rows say whether their answers were cut, and whether they repeat themselves at the end
    long_answers: ClassVar[bool] = False
    #: True if scores leave out a reasoning model's thinking (:func:`kvbench.metrics.reasoning.without_thinking`)
    removes_thinking: ClassVar[bool] = False
    #: True if only times and memory are measured, so that the content of the generated text does not matter
    times_only: ClassVar[bool] = False

    def samples(self) -> Iterator[Sample]:
        """Yield all samples within the configured limit, in a fixed order."""
        raise NotImplementedError(f"{type(self).__name__}.samples")

    def identity(self) -> dict[str, Any]:
        """Return JSON data that identifies what the samples contain, not their number; hashed into the run id."""
        raise NotImplementedError(f"{type(self).__name__}.identity")

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return the scores of one answer by name; empty if the task does not score answers.

        They are ``score``, between 0 and 1, and any variants of it, for example ``strict`` and ``flexible``.
        """
        raise NotImplementedError(f"{type(self).__name__}.score")

    def score_questions(self, sample: Sample, predictions: Sequence[str]) -> dict[str, float]:
        """Score the answers to all questions of a sample whose work is :class:`AskQuestions`, in their order.

        Returns:
            ``score``, the mean of the questions' scores (:meth:`score`), and ``all``, which is 1.0 if every question
            has the score 1 and 0.0 otherwise.

        Raises:
            ValueError: the numbers of answers and questions differ.
        """
        assert isinstance(sample.work, AskQuestions)
        scores = [
            self.score(replace(sample, answers=(question.answer,), meta=question.meta), prediction)["score"]
            for question, prediction in zip(sample.work.questions, predictions, strict=True)
        ]
        return {"score": sum(scores) / len(scores), "all": float(all(score == 1.0 for score in scores))}

    def next_samples(self, rows: Mapping[str, Row]) -> Iterator[Sample]:
        """Yield all samples that are known so far, including those already run, whose rows are `rows` by sample id.

        If :attr:`adaptive` is set, later samples depend on results of earlier ones, and the runner calls this method
        again after every sample.
        """
        return self.samples()

    def check(self) -> None:
        """Raise ConfigError if an option of the data set is invalid, whatever the model and the method are."""

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the data set cannot be run with the configured model, method, decoding and runtime."""

    def packages(self) -> tuple[Package, ...]:
        """Return the optional Python packages that the data set needs with its current options."""
        return ()

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield which files of the hub the data set needs, as pairs of a source and a name.

        The name replaces ``{task}`` in the source's `file`. It is a task or a split, for example ``test``.
        """
        return iter(())

    def bind(self, tokenizer: Any) -> None:
        """Set the model's tokenizer; the runner does so before :meth:`samples` if :attr:`needs_tokenizer` is True."""

    def notes(self) -> dict[str, Any]:
        """Return facts about the data that are stored with the results but are not part of the run id."""
        return {}

    def machine_identity(self, runtime: Any, device: Callable[[], str]) -> dict[str, Any] | None:
        """Return the facts about the machine on which the results depend; None if the task measures no time or memory.

        They are the device's name and runtime options as JSON data, which is hashed into the run id. Calling `device`,
        which returns the name, imports torch.
        """
        return None


class TokenTask(Task):
    """Base class of data sets that need the model's tokenizer, because their prompts have a given number of tokens."""

    needs_tokenizer = True
    _tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        """Set the model's tokenizer."""
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises KvbenchError if :meth:`bind` has not been called."""
        if self._tokenizer is None:
            raise KvbenchError(
                f"{type(self).__name__}: samples are built from tokens, so bind(tokenizer) must be called first"
            )
        return self._tokenizer


def check_list(key: str, values: Sequence[Any], allowed: Iterable[object]) -> None:
    """Raise ConfigError if the list of an option is empty, or has a value twice."""
    if not values:
        raise ConfigError(key, [], "must not be empty", allowed=allowed)
    if len(set(values)) < len(values):
        raise ConfigError(key, list(values), "lists a value twice", hint="list each value once")


def check_shots(shots: int, train: Sequence[Any], place: object) -> None:
    """Raise ConfigError if there are too few training records for the configured number of few-shot examples.

    `place` is the file of the records, for the message.
    """
    if len(train) < shots:
        raise ConfigError(
            "dataset.shots",
            shots,
            f"exceeds the number of records in {place}, {len(train)}",
            hint=f"set dataset.shots to at most {len(train)}, or use the whole train split",
        )
