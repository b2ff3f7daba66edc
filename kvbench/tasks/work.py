"""Kinds of work that a sample can ask for; the runner has a strategy for each (:mod:`kvbench.runner.session`).

Each kind is a class whose typed fields are the strategy's input. The class decides the strategy; a sample's ``meta``
never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Work:
    """Base class of the kinds of work."""


@dataclass(frozen=True)
class Generate(Work):
    """Generation of an answer to the sample's prompt."""


@dataclass(frozen=True)
class Question:
    """One of several questions about a shared text.

    Args:
        prompt: text that follows the shared text.
        query: the question without any wrapper, with which a retriever searches.
        answer: reference answer.
        target: the answer exactly as it would follow `prompt`; None if that is `answer` unchanged.
        meta: data for the scorer and for analyses, as in a sample.
    """

    prompt: str
    answer: str
    query: str = ""
    target: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continuation(self) -> str:
        """Text of the reference answer as it would follow `prompt`."""
        return self.answer if self.target is None else self.target


@dataclass(frozen=True)
class AskQuestions(Work):
    """Several questions on one cache: the shared text is cached before the model sees any question.

    Args:
        shared: number of characters at the beginning of the sample's prompt that are the shared text.
        questions: the questions, each answered on a copy of the cache.
    """

    shared: int
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class ScoreText(Work):
    """Measurement of the likelihood of a span of a text, for perplexity; nothing is generated.

    Args:
        ids: token ids of the span.
        first: index of the first scored token.
        bytes: number of UTF-8 bytes of the scored text.
        document: index of the document that the span is from.
        mode: ``decode``, ``simulated`` or ``fp16`` (:mod:`kvbench.tasks.perplexity`).
        prefill: number of tokens that form a prompt and are not scored.
        chunk: number of tokens per forward pass in ``decode``, or ``auto``.
    """

    ids: tuple[int, ...]
    first: int
    bytes: int
    document: int
    mode: str
    prefill: int
    chunk: int | Literal["auto"]


@dataclass(frozen=True)
class MeasurePoint(Work):
    """Measurement of time and memory at one prompt length and batch size.

    Args:
        prompt: prompt length in tokens.
        batch: batch size.
        repeats: number of timed prefills.
        warm_up: number of tokens generated once before anything is timed.
        seed: seed of the prompts' words.
        untimed: number of prefills before the timed ones.
        fill: ``prefill`` runs the prompt through the model; ``random`` fills the cache with random keys and values.
        compare: number of tokens for which captured steps are compared with eager ones; 0 for no comparison.
        stock: caches of stock transformers that are measured as well.
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
