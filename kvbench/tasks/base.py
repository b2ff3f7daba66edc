"""What a benchmark gives to the runner: samples with their spans, and a pure scoring function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbench.errors import ConfigError


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
        answers: reference answers; the score is taken over them as the metric says.
        max_new_tokens: limit on generated tokens.
        stop: strings at which the generation ends (not part of the prediction).
        truncation: ``middle`` cuts a prompt that is too long in its middle (counted in the row), ``longbench`` does so
            by LongBench's rule (before the chat wrapper, by decoding the halves), ``refuse`` raises.
        meta: whatever the scorer or an analysis needs (answer's place in the context, all classes, ...), JSON data. The
            runner reads, where they are there: ``chat`` (False: no chat wrapper), ``system`` (text of a system turn),
            ``target`` (the answer as it follows the prompt), ``query_source`` (what stands for an empty query),
            ``end_text`` (a text whose last token ends the answer), ``say_something`` (its first token is no end),
            ``prompt_limit`` and ``prompt_limits`` (most tokens of the prompt, in place of the model's), ``ids`` (the
            prompt in token ids, used as they are; ``ids_context``: token range of the context in them), ``answer_ids``
            (the reference in token ids), ``warm_up`` (run before the others; its row counts for peak memory alone).
    """

    id: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    length: int | None = None
    context_span: tuple[int, int] | None = None
    query: str = ""
    stop: tuple[str, ...] = ()
    truncation: str = "middle"
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def score_key(self) -> str:
        """Key of the sample's score in ``metrics.json``: ``task`` or ``task@length``."""
        return self.task if self.length is None else f"{self.task}@{self.length}"


class Setup(Protocol):
    """What a task may look at of the run that it is part of (:class:`kvbench.config.run_config.RunConfig`)."""

    @property
    def model(self) -> Any:
        """``max_length``, ``prompt_limit``, ``weights`` and names of the model."""
        ...

    @property
    def method(self) -> Any:
        """The method, for windows that would not measure it."""
        ...

    @property
    def decoding(self) -> Any:
        """``max_new_tokens``, ``stop`` and how tokens are drawn."""
        ...

    @property
    def runtime(self) -> Any:
        """``batch_size`` and where the run takes place."""
        ...


class Task(Protocol):
    """A data set of one or more tasks. Knows nothing of models or caches; `kvbench.tasks.load` makes one."""

    #: raised when the samples or their prompts change: part of the run's identity
    version: int
    #: raised when scoring changes: outside the run's identity, so that old predictions are re-scored
    scorer_version: int

    def samples(self) -> Iterator[Sample]:
        """All samples within the configured limit, in a fixed order."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON data that determines the samples but for how many there are (hashed into the run id)."""
        ...

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """``{"score": 0..1, ...}``; further keys are variants (for example ``strict``, ``flexible``)."""
        ...

    def score_questions(self, sample: Sample, predictions: Sequence[str]) -> dict[str, float]:
        """As :meth:`score`, for the answers to all of ``meta["questions"]``; only tasks with such samples have it."""
        ...


def check_shots(shots: int, train: Sequence[Any], place: object) -> None:
    """Raise ConfigError where there are fewer examples than `shots`; `place` is where they were read."""
    if len(train) < shots:
        raise ConfigError(
            "dataset.shots",
            shots,
            f"is more than the {len(train)} records of {place}",
            hint=f"dataset.shots={len(train)} at most, or the whole train split",
        )
