"""Samples before filler is added to reach their length: the records to hide, and the questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.tasks.mini.rng import Rng


@dataclass(frozen=True)
class DraftQuestion:
    """One question about a sample's context, with its answer and where the context gives it.

    Args:
        prompt: the question as it stands after the context. It begins with whitespace and does not end with it.
        query: the bare question, without a label such as ``Question:``, as input for methods that search the context
            for relevant passages.
        answer: the right answer, without the space that separates it from `prompt` (but see `glued`).
        evidence: the places of the answer in the context. Each is a triple: the index of a record, and the beginning
            and end of a half-open character range in that record.
        glued: True if `answer` follows `prompt` directly, without a space in between, as in code. `answer` then begins
            with whatever whitespace it needs.
        parts: the single values in the answer if each is scored by itself, else empty.
    """

    prompt: str
    query: str
    answer: str
    evidence: tuple[tuple[int, int, int], ...]
    glued: bool = False
    parts: tuple[str, ...] = ()

    @property
    def continuation(self) -> str:
        """The answer with any space before it, so that ``prompt + continuation`` is the complete text."""
        return self.answer if self.glued else f" {self.answer}"


@dataclass
class Draft:
    """Content of a sample without its filler: texts with the answers (records), and questions about them.

    The first question ends the sample's own prompt. `meta` becomes part of the finished sample's.

    Args:
        style: key in :data:`kvbench.tasks.mini.compose.WRAPPERS` of the instructions around the context.
        records: texts to scatter among the filler. Each begins on a new line, and has no whitespace at either end.
        ordered: True to keep the records in this order in the context, False to shuffle them.
        closing: text that ends the context, after all records and filler. It is empty or begins with whitespace.
        code: True for generated code as filler, False for prose.
    """

    style: str
    records: list[str]
    questions: list[DraftQuestion]
    ordered: bool = False
    closing: str = ""
    code: bool = False
    meta: dict[str, object] = field(default_factory=dict)


class Writer(Protocol):
    """Interface of the generator from which tasks take sentences (:class:`kvbench.tasks.mini.prose.Prose`)."""

    def sentence(self) -> str:
        """Return one sentence, without line breaks."""
        ...

    def passage(self, n_words: int) -> str:
        """Return whole sentences, without line breaks, until they have at least `n_words` words in total."""
        ...


@dataclass
class Setting:
    """Input from which a task generates one sample: its random numbers, its length, and whether it is for training.

    Args:
        length: the sample's length in tokens, which bounds the number of records.
        vary: True for training samples, whose records vary in number and size at random. False for evaluation samples,
            where both are fixed.
        questions: number of questions to ask. A sample with too few records for it asks fewer.
    """

    rng: Rng
    writer: Writer
    length: int
    vary: bool = False
    questions: int = 1

    def count(self, most: int, tokens_each: int, least: int = 1) -> int:
        """Return how many records the sample should have.

        An evaluation sample gets `most`, or as many as fit into its length with `tokens_each` tokens for each if they
        are fewer, but at least `least`. A training sample gets a random number between a third of that (but at least
        `least`) and all of it.
        """
        n = max(least, min(most, self.length // tokens_each))
        return self.rng.between(max(least, n // 3), n) if self.vary else n

    def size(self, usual: int, low: int, high: int) -> int:
        """Return a parameter of a task: `usual` for evaluation, a random integer in [`low`, `high`] for training."""
        return self.rng.between(low, high) if self.vary else usual

    def pick(self, n_records: int) -> list[int]:
        """Choose at random which records to ask about, and return their indices; none is chosen twice.

        There are :attr:`questions` of them, or `n_records` if that is smaller.
        """
        return self.rng.sample(range(n_records), min(self.questions, n_records))
