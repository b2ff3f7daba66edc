"""Drafts of samples, before filler brings them to their length: records to hide, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.tasks.mini.rng import Rng


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Args:
        prompt: text after the context; begins with whitespace and does not end with it.
        query: the question without any wrapper, with which a retriever searches.
        answer: the right answer, without the space before it (unless `glued`).
        evidence: places in the context that give the answer: index of the record, and start and end of the characters
            in it.
        glued: whether the answer follows `prompt` directly, with its own leading whitespace (code).
        parts: the values in the answer if each is scored separately (multi-value).
    """

    prompt: str
    query: str
    answer: str
    evidence: tuple[tuple[int, int, int], ...]
    glued: bool = False
    parts: tuple[str, ...] = ()

    @property
    def continuation(self) -> str:
        """The answer as it would follow `prompt`, leading whitespace included."""
        return self.answer if self.glued else f" {self.answer}"


@dataclass
class Draft:
    """A sample without filler.

    Args:
        style: key of the wrapper around the context in :data:`kvbench.tasks.mini.templates.WRAPPERS`.
        records: texts to hide in the filler, each on its own lines, without whitespace at either end.
        questions: questions about the records; the first is that of the sample itself.
        ordered: whether the records keep their order; else they are shuffled.
        closing: text at the end of the context, after all filler; begins with whitespace.
        code: whether the filler is code instead of prose.
        meta: additional JSON data for the sample's `meta`.
    """

    style: str
    records: list[str]
    questions: list[Question]
    ordered: bool = False
    closing: str = ""
    code: bool = False
    meta: dict[str, object] = field(default_factory=dict)


class Writer(Protocol):
    """Source of the sentences in a task's records and questions."""

    def sentence(self) -> str:
        """Return one sentence on one line."""
        ...

    def passage(self, n_words: int) -> str:
        """Return whole sentences with about `n_words` words in total, on one line."""
        ...


@dataclass
class Setting:
    """The input from which a task makes a draft.

    Args:
        rng: the sample's own stream of random numbers.
        writer: source of sentences.
        length: the sample's length in tokens, which limits the number of records.
        vary: True draws the numbers and sizes of records at random (training), False fixes them (evaluation).
        questions: number of questions wanted; tasks with fewer records give fewer.
    """

    rng: Rng
    writer: Writer
    length: int
    vary: bool = False
    questions: int = 1

    def count(self, most: int, tokens_each: int, least: int = 1) -> int:
        """Return the number of records to make: the smaller of `most` and ``length // tokens_each``, at least `least`.

        In training, the number is drawn between a third of that and all of it.
        """
        n = max(least, min(most, self.length // tokens_each))
        return self.rng.between(max(least, n // 3), n) if self.vary else n

    def size(self, usual: int, low: int, high: int) -> int:
        """Return `usual` in evaluation, and a random number from `low` to `high` in training."""
        return self.rng.between(low, high) if self.vary else usual

    def pick(self, n_records: int) -> list[int]:
        """Return the distinct indices of the records to ask about: `questions` of them, or all if there are fewer."""
        return self.rng.sample(range(n_records), min(self.questions, n_records))
