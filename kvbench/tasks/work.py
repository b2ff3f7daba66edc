"""Kinds of work that a sample can ask for; the runner has a strategy for each (:mod:`kvbench.runner.session`).

Each kind of work is a class. The runner chooses the strategy by the class, and the fields are the strategy's input.
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
        query: the question without any wrapper, with which a retriever searches the context; may be empty.
        answer: reference answer.
        target: the answer exactly as it would follow `prompt`, for example with a leading space; None if `answer`
            follows unchanged.
        meta: JSON data for the scorer and for analyses; the runner never reads it.
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
    """Several questions about one text, which is cached once, before the model sees any question.

    Args:
        shared: number of characters of the shared text, with which the sample's prompt begins.
        questions: the questions. Each is answered on its own copy of the cache.
    """

    shared: int
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class ScoreText(Work):
    """Measurement of the likelihood of a span of a text, for perplexity; nothing is generated.

    Args:
        ids: token ids of the span.
        first: index in `ids` of the first scored token; all tokens after it are scored too. It is at least `prefill`.
            It is greater if spans overlap: the tokens before `first` have then been scored in the previous span.
        bytes: number of UTF-8 bytes of the scored text.
        document: 0-based index of the document that contains the span.
        mode: ``decode``, ``simulated`` or ``fp16`` (explained in :mod:`kvbench.tasks.perplexity`).
        prefill: number of tokens at the beginning of the span that are cached as a prompt; 0 for none.
        chunk: number of tokens per forward pass if `mode` is ``decode``; ``auto`` for 128.
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
        seed: seed of the random words in the prompts.
        untimed: number of untimed prefills that run before the timed ones.
        fill: ``prefill`` runs the prompt through the model; ``random`` fills the cache with random keys and values.
        compare: number of tokens that are generated again with eager steps, to compare them with the tokens that CUDA
            graphs generated; 0 for no comparison.
        stock: caches of unmodified transformers that are also measured.
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
