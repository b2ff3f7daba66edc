"""Kinds of work that a sample can ask of the runner: a sample declares one, and the runner has a strategy for each.

A kind carries what its strategy reads, typed. The runner looks at the class alone (:class:`kvbench.runner.session`), so
no strategy is chosen by a key in a sample's ``meta``.
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
    """One of several questions on a shared text.

    Args:
        prompt: text that follows the shared text.
        query: bare question (what a retriever searches with).
        answer: reference answer.
        target: the answer as it follows `prompt`; None: `answer` itself.
        meta: what the scorer and analyses need, as in a sample.
    """

    prompt: str
    answer: str
    query: str = ""
    target: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continuation(self) -> str:
        """Text that would be the right answer, as it follows `prompt`."""
        return self.answer if self.target is None else self.target


@dataclass(frozen=True)
class AskQuestions(Work):
    """Several questions on one cache: the shared text is cached before any question is read.

    Args:
        shared: characters of the sample's prompt that all questions share.
        questions: asked one by one, each on a copy of the cache.
    """

    shared: int
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class ScoreText(Work):
    """Likelihood of a span of a text, for perplexity; nothing is generated.

    Args:
        ids: token ids of the span.
        first: index of the first scored token.
        bytes: UTF-8 bytes of the scored text.
        document: index of the document that the span is from.
        mode: ``decode``, ``simulated`` or ``fp16`` (:mod:`kvbench.tasks.perplexity`).
        prefill: tokens that are a prompt, not scored.
        chunk: tokens of a forward pass in ``decode``, or ``auto``.
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
    """Time and memory of one prompt length and batch.

    Args:
        prompt: tokens of a prompt.
        batch: sequences.
        repeats: prefills that are timed.
        warm_up: tokens generated once, before anything is timed.
        seed: of the prompts' words.
        untimed: prefills before the timed ones.
        fill: ``prefill``, or ``random``: random keys and values in place of the prompt's.
        compare: tokens of captured steps that are compared with those of eager ones; 0: none.
        stock: caches of stock transformers that are measured too.
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
