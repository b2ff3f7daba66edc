"""Kinds of work that a sample can ask for; the runner has a strategy for each (:mod:`kvbench.runner.session`).

Each kind of work is a class. The runner chooses the strategy by the class, and the fields are the strategy's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Work:
    """Base class: what the runner does with a sample. The subclass selects the runner's strategy."""


@dataclass(frozen=True)
class Generate(Work):
    """Generate one answer to the sample's prompt: the usual kind of work."""


@dataclass(frozen=True)
class ReasonThenAnswer(Work):
    """Generate reasoning to the sample's prompt, and then the answer to a second prompt that quotes the reasoning.

    The sample's `prompt` and `max_new_tokens` are those of the reasoning; its `answers` belong to the second prompt.

    Args:
        before: text of the second prompt before the reasoning, which is stripped.
        after: text of the second prompt after it.
        max_new_tokens: maximum number of tokens of the answer.
    """

    before: str
    after: str
    max_new_tokens: int


@dataclass(frozen=True)
class Question:
    """One of several questions about a shared text (:class:`AskQuestions`).

    Args:
        prompt: the question as it stands after the shared text.
        query: the bare question, as input for methods that search the context for relevant passages; may be empty.
        target: the answer exactly as it would follow `prompt`, for example with a leading space; None if that is
            `answer` itself.
        meta: JSON data for the scorer and for analyses; the runner never reads it.
    """

    prompt: str
    answer: str
    query: str = ""
    target: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continuation(self) -> str:
        """The reference answer exactly as it would follow `prompt`: `target`, or `answer` if `target` is None."""
        return self.answer if self.target is None else self.target


#: relation of several questions about one text (:class:`AskQuestions`)
Turns = Literal["separate", "stored", "anew"]
#: answers that earlier turns of a conversation have: the reference answers, or the model's own
History = Literal["reference", "own"]


@dataclass(frozen=True)
class AskQuestions(Work):
    """Cache a text once, without any question in view, and then answer several questions about it.

    Args:
        shared: length of that text in characters; the sample's prompt begins with it.
        questions: the questions, in their order.
        turns: ``separate``: each question is answered on its own copy of the cache, and sees no other. ``stored``: the
            questions are turns of a conversation in one cache, which keeps earlier questions with their answers as the
            method stores them. ``anew``: the same conversation, but the text and all earlier turns are prefilled again
            for each question, as if nothing had been stored.
        history: the answers that earlier turns have.
    """

    shared: int
    questions: tuple[Question, ...]
    turns: Turns = "separate"
    history: History = "reference"


@dataclass(frozen=True)
class ScoreText(Work):
    """Measure the likelihood of a span of tokens, for perplexity; nothing is generated.

    The other fields are those of :class:`kvbench.tasks.perplexity.Perplexity`, but `prefill` is 0 for no prompt.

    Args:
        ids: token ids of the span.
        first: index in `ids` of the first token to score; all tokens after it are scored too. It is at least `prefill`.
            It is larger if spans overlap, because the span before this one has already scored the tokens before it.
        bytes: length of the scored text in UTF-8 bytes.
        document: 0-based index of the document that contains the span.
    """

    ids: tuple[int, ...]
    first: int
    bytes: int
    document: int
    mode: str
    prefill: int
    chunk: int | Literal["auto"]


@dataclass(frozen=True)
class CompareTokens(Work):
    """Decode given tokens through the cache, and compare each prediction with that of the full-precision cache.

    The other fields are those of :class:`kvbench.tasks.fidelity.Fidelity`. ``mode=simulated`` requires `ids`.

    Args:
        ids: token ids of a span of text, whose beginning is the prompt. None for the sample's own prompt, followed by
            the answer that `answers` selects.
        prefill: number of tokens of `ids` that are the prompt.
        probe: True to measure the error of each layer's attention too.
    """

    ids: tuple[int, ...] | None = None
    prefill: int = 0
    mode: Literal["decode", "simulated"] = "decode"
    answers: Literal["fp16", "task"] = "fp16"
    statistics: Literal["exact", "llamacpp"] = "exact"
    reference: Literal["stored", "live"] = "stored"
    probe: bool = False


@dataclass(frozen=True)
class MeasurePoint(Work):
    """Measure time and memory at one prompt length in tokens and batch size.

    The other fields are those of :class:`kvbench.tasks.efficiency.Efficiency`.
    """

    prompt: int
    batch: int
    repeats: int
    warm_up: int
    seed: int
    untimed: int = 0
    fill: Literal["prefill", "random"] = "prefill"
    compare: int = 0
    stock: tuple[str, ...] = ()
