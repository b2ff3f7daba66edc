"""Samples before filler is added to reach their length: the records to hide, and the questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.tasks.mini.rng import Rng


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Args:
        prompt: text after the context. It begins with whitespace and does not end with it.
        query: the question without any wrapper, with which a retriever searches.
        answer: the right answer, without the space before it (unless `glued`).
        evidence: places in the context that give the answer. Each is the index of a record and a half-open character
            range in that record.
        glued: True if no space is inserted between `prompt` and `answer`, as for code, where `answer` itself begins
            with any whitespace it needs.
        parts: the values in the answer if each is scored separately, else empty.
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
    """A sample before filler is added: the records to hide in the filler, and the questions about them.

    Args:
        style: key of the wrapper around the context in :data:`kvbench.tasks.mini.templates.WRAPPERS`.
        records: texts to hide in the filler, each on its own lines, without whitespace at either end.
        questions: questions about the records; the sample's own prompt ends with the first.
        ordered: True keeps the order of the records in the context, False shuffles them.
        closing: text at the end of the context, after all filler. It begins with whitespace, or is empty.
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
    """The input from which a task generates the records and questions of one sample.

    Args:
        rng: the sample's own stream of random numbers.
        writer: source of sentences.
        length: the sample's length in tokens, which limits the number of records.
        vary: True draws the number and size of the records at random, for training. False uses fixed values, for
            evaluation.
        questions: number of questions to ask; a task with fewer records asks fewer.
    """

    rng: Rng
    writer: Writer
    length: int
    vary: bool = False
    questions: int = 1

    def count(self, most: int, tokens_each: int, least: int = 1) -> int:
        """Return the number of records that a sample should have.

        For evaluation, it is as many as fit into the sample's length, up to `most` and at least `least`. For training,
        it is drawn at random between a third of that number and all of it.

        Args:
            most: largest number of records.
            tokens_each: number of tokens of the sample's length that one record requires.
            least: smallest number of records.
        """
        n = max(least, min(most, self.length // tokens_each))
        return self.rng.between(max(least, n // 3), n) if self.vary else n

    def size(self, usual: int, low: int, high: int) -> int:
        """Return `usual` for evaluation, or a random integer from `low` to `high` (both included) for training."""
        return self.rng.between(low, high) if self.vary else usual

    def pick(self, n_records: int) -> list[int]:
        """Return the indices of the records to ask about, drawn without repetition.

        Their number is :attr:`questions`, or `n_records` if that is smaller.
        """
        return self.rng.sample(range(n_records), min(self.questions, n_records))
