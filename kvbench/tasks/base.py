"""Base classes of data sets. A data set (task) yields samples for the runner and scores the answers."""

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
        chat: whether the prompt is put into the model's chat wrapper.
        system: text of a system turn, used only if the chat wrapper is the tokenizer's own template.
        limit: maximum number of prompt tokens: a number, ``fill`` for ``model.max_length`` minus the tokens to
            generate, or None for ``model.prompt_limit``.
        limits: limits for single models, keyed by the name of the model or of its preset; they override `limit`.
        ids: token ids of the whole prompt, used unchanged; None to tokenize the text.
        ids_context: half-open token range that the context takes up in `ids`; None if the sample has no context.
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
        length: nominal length in tokens, for tasks that are run at several lengths (the score is then keyed
            ``task@length``); None for other tasks.
        prompt: the whole prompt as text, before any chat wrapper.
        context_span: character range of the context (the documents, without the question) in `prompt`; None if the
            task does not separate context and question.
        query: text of the question, with which Cocktail searches the context; may be empty.
        query_source: which text to search with if `query` is empty, for example ``last_chunk`` for the last chunk of
            the context; None leaves the choice to the method.
        answers: reference answers; the metric defines how several of them are combined.
        target: the first reference exactly as it would follow the prompt, for example with a leading space; None if
            the first of `answers` follows the prompt unchanged.
        answer_ids: token ids of the first reference, in place of `target`.
        max_new_tokens: limit on generated tokens.
        stop: strings at which generation ends; they are not part of the prediction.
        end_text: text whose last token ends the answer, in addition to the model's end-of-sequence tokens.
        say_something: True if the first generated token must not be one that ends the answer, so that no answer is
            empty.
        truncation: treatment of a prompt that is too long. ``middle`` cuts tokens from the middle of the prompt and
            records their number. ``longbench`` follows LongBench: the prompt is cut before the chat wrapper is added,
            and its first and last tokens are decoded back to text. ``refuse`` raises an error.
        rules: rules by which the prompt becomes tokens.
        work: what the runner does with the sample, for example generate an answer or score a text.
        warm_up: whether the sample only warms up the device. Of its result, only the peak memory is used.
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
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def score_key(self) -> str:
        """Key of the score in ``metrics.json`` to which the sample contributes: ``task`` or ``task@length``."""
        return self.task if self.length is None else f"{self.task}@{self.length}"

    @property
    def continuation(self) -> str:
        """Text of the first reference as it would follow the prompt; empty if the sample has no reference."""
        if self.target is not None:
            return self.target
        return self.answers[0] if self.answers else ""


class Setup(Protocol):
    """Parts of a run's configuration (:class:`kvbench.config.run_config.RunConfig`) that a task may read."""

    @property
    def model(self) -> Any:
        """Configuration of the model, with ``max_length``, ``prompt_limit``, ``weights`` and the model's names."""
        ...

    @property
    def method(self) -> Any:
        """Configuration of the method, which also tells the perplexity task which of its modes can be used."""
        ...

    @property
    def decoding(self) -> Any:
        """Options of decoding: ``max_new_tokens``, ``stop`` and the sampling options."""
        ...

    @property
    def runtime(self) -> Any:
        """Options of the runtime: ``batch_size`` and the options of the device."""
        ...


class Task:
    """Base class of data sets.

    A subclass is a dataclass whose fields are the options of the configuration group `dataset`. It must define
    :meth:`samples`, :meth:`identity` and :meth:`score`; all other methods have defaults here. A task does not depend
    on models or caches. :func:`kvbench.tasks.load` constructs a task from its configuration.
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

    def samples(self) -> Iterator[Sample]:
        """Yield all samples within the configured limit, in a fixed order."""
        raise NotImplementedError(f"{type(self).__name__}.samples")

    def identity(self) -> dict[str, Any]:
        """Return JSON data that identifies the content of the samples, without their number.

        The data is hashed into the run id.
        """
        raise NotImplementedError(f"{type(self).__name__}.identity")

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return the scores of one prediction by name.

        Args:
            sample: the sample that was run.
            prediction: the text that the model generated.

        Returns:
            ``score`` in 0..1, and any variants, for example ``strict`` and ``flexible``. Empty if the task does not
            score predictions.
        """
        raise NotImplementedError(f"{type(self).__name__}.score")

    def score_questions(self, sample: Sample, predictions: Sequence[str]) -> dict[str, float]:
        """Score the answers to all questions of a sample whose work is :class:`AskQuestions`.

        Args:
            sample: the sample with the questions.
            predictions: the text generated for each question, in the order of the questions.

        Returns:
            ``score``, the mean of the questions' scores (:meth:`score`), and ``all``, which is 1.0 if every question
            scores 1, else 0.0.

        Raises:
            ValueError: the numbers of predictions and questions differ.
        """
        assert isinstance(sample.work, AskQuestions)
        scores = [
            self.score(replace(sample, answers=(question.answer,), meta=question.meta), prediction)["score"]
            for question, prediction in zip(sample.work.questions, predictions, strict=True)
        ]
        return {"score": sum(scores) / len(scores), "all": float(all(score == 1.0 for score in scores))}

    def next_samples(self, rows: Mapping[str, Row]) -> Iterator[Sample]:
        """Yield all samples that are known so far, including those already run.

        The runner calls this again after every row if :attr:`adaptive` is set.

        Args:
            rows: recorded results of the samples already run, by sample id.
        """
        return self.samples()

    def check(self) -> None:
        """Raise ConfigError if an option of the data set is invalid, regardless of the rest of the configuration."""

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the rest of the configuration cannot run this data set."""

    def packages(self) -> tuple[Package, ...]:
        """Return the optional Python packages that the data set needs with its current options."""
        return ()

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the files to download from the hub.

        Each is a pair of a source and the name that replaces ``{task}`` in the source's `file`.
        """
        return iter(())

    def bind(self, tokenizer: Any) -> None:
        """Receive the model's tokenizer; called before :meth:`samples` if :attr:`needs_tokenizer` is set."""

    def notes(self) -> dict[str, Any]:
        """Return facts about the data that are recorded with the results but do not affect the run id."""
        return {}

    def machine_identity(self, runtime: Any, device: Callable[[], str]) -> dict[str, Any] | None:
        """Return the facts about the machine, and the runtime options, on which the results depend.

        Args:
            runtime: options of the `runtime` group.
            device: returns the name of the device; calling it imports torch.

        Returns:
            JSON data that is hashed into the run id; None if the results do not depend on the machine.
        """
        return None


class TokenTask(Task):
    """Base class of data sets that build prompts of a given number of tokens, and so need the model's tokenizer."""

    needs_tokenizer = True
    _tokenizer: Any = None

    def bind(self, tokenizer: Any) -> None:
        """Receive the model's tokenizer."""
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises KvbenchError before :meth:`bind`."""
        if self._tokenizer is None:
            raise KvbenchError(
                f"{type(self).__name__}: samples are built from tokens, so bind(tokenizer) must be called first"
            )
        return self._tokenizer


def check_shots(shots: int, train: Sequence[Any], place: object) -> None:
    """Raise ConfigError if there are fewer training records than few-shot examples.

    Args:
        shots: number of few-shot examples per prompt.
        train: the records from which the examples are taken.
        place: file of the records, for the message.
    """
    if len(train) < shots:
        raise ConfigError(
            "dataset.shots",
            shots,
            f"exceeds the number of records in {place}, {len(train)}",
            hint=f"set dataset.shots to at most {len(train)}, or use the whole train split",
        )
