"""Drafts of samples, before they have a length: records to hide in the filler, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.tasks.mini.rng import Rng


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Args:
        prompt: what stands after the context; starts with whitespace and does not end with it.
        query: the bare question (what a retriever searches with).
        answer: what must follow `prompt`, without the space before it (unless `glued`).
        evidence: where the context says so: index of the record, start and end of the characters in it.
        glued: the answer begins with its own whitespace and stands directly after `prompt` (code).
        parts: the values that make up the answer, where each is scored by itself (multi-value).
    """

    prompt: str
    query: str
    answer: str
    evidence: tuple[tuple[int, int, int], ...]
    glued: bool = False
    parts: tuple[str, ...] = ()

    @property
    def continuation(self) -> str:
        """The answer as it follows `prompt` in a text, its leading whitespace included."""
        return self.answer if self.glued else f" {self.answer}"


@dataclass
class Draft:
    """A sample without filler.

    Args:
        style: which wrapper the context stands in: a key of :data:`kvbench.tasks.mini.templates.WRAPPERS`.
        records: what is hidden in the filler, each on lines of its own, without whitespace at either end.
        questions: the first is the sample's own.
        ordered: the records keep their order (else they are shuffled).
        closing: text at the end of the context, after all filler; starts with whitespace.
        code: the filler is code rather than prose.
    """

    style: str
    records: list[str]
    questions: list[Question]
    ordered: bool = False
    closing: str = ""
    code: bool = False
    meta: dict[str, object] = field(default_factory=dict)


class Writer(Protocol):
    """Source of the sentences that are part of a task's records or questions."""

    def sentence(self) -> str:
        """Return one sentence as one line."""
        ...

    def passage(self, n_words: int) -> str:
        """Return whole sentences of about `n_words` words, as one line."""
        ...


@dataclass
class Setting:
    """The ingredients of a sample.

    Args:
        rng: the sample's own stream of random numbers.
        writer: source of sentences.
        length: the sample's length in tokens, which sets how many records there are.
        vary: draw counts at random (the training mix) instead of taking the most (evaluation).
        questions: how many questions are wanted; a task that has fewer gives fewer.
    """

    rng: Rng
    writer: Writer
    length: int
    vary: bool = False
    questions: int = 1

    def count(self, most: int, tokens_each: int, least: int = 1) -> int:
        """Return how many records to make: as many as `most`, but no more than ``length / tokens_each``."""
        n = max(least, min(most, self.length // tokens_each))
        return self.rng.between(max(least, n // 3), n) if self.vary else n

    def size(self, usual: int, low: int, high: int) -> int:
        """Return `usual` at evaluation, and anything in [low, high] in training."""
        return self.rng.between(low, high) if self.vary else usual

    def pick(self, n_records: int) -> list[int]:
        """Return the indices of the records to ask about: all different, as many as `questions` allows."""
        return self.rng.sample(range(n_records), min(self.questions, n_records))
