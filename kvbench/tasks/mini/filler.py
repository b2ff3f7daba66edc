"""Filler between the records of a sample: sentences from the grammar, or generated code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbench.tasks.mini import code, vocabulary
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng

#: function from texts to their token ids, without special tokens
Encode = Callable[[Sequence[str]], list[list[int]]]

#: a filler stops once no more than this many tokens of its budget are left
SLACK = 8


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt's text, with its token ids and its role.

    `role` is ``fixed`` for the instruction, ``record`` for a text that a task generated, or ``filler``.
    """

    text: str
    ids: list[int]
    role: str = "filler"


class Filler(Protocol):
    """Interface of the generators of irrelevant text, which brings samples to their length."""

    def paragraphs(self, budget: int, sentences: int) -> list[list[Piece]]:
        """Generate filler that takes nearly `budget` tokens, and never more, with `sentences` sentences per paragraph.

        Each paragraph is a list of pieces, such as sentences. The first begins with a line break, the others with a
        space.
        """
        ...


class ProseFiller:
    """Filler of generated English sentences; no sentence occurs twice in a sample.

    `prose` must be the generator from which the task takes the sentences of its records, so that the filler repeats
    none of these either. `encode` measures lengths.
    """

    def __init__(self, prose: Prose, encode: Encode) -> None:
        self._prose, self._encode = prose, encode

    def paragraphs(self, budget: int, sentences: int) -> list[list[Piece]]:
        """See :meth:`Filler.paragraphs`. The last paragraph may have fewer or more sentences."""
        paragraphs: list[list[Piece]] = []
        count = 0
        while budget > 64:
            # fewer than will fit, since encoding a sentence that is not used wastes time
            starts = ["\n" if (count + i) % sentences == 0 else " " for i in range(max(1, budget // 32))]
            texts = [start + self._prose.sentence() for start in starts]
            for text, ids in zip(texts, self._encode(texts), strict=True):
                if len(ids) > budget:
                    break
                if text[0] == "\n":
                    paragraphs.append([])
                paragraphs[-1].append(Piece(text, ids))
                budget -= len(ids)
                count += 1
        for _ in range(8):  # the last sentences are chosen by their length
            if budget <= SLACK:
                break
            texts = [("" if not paragraphs else " ") + self._prose.sentence() for _ in range(8)]
            texts = texts if paragraphs else ["\n" + text for text in texts]
            pieces = [Piece(text, ids) for text, ids in zip(texts, self._encode(texts), strict=True)]
            best = max((p for p in pieces if len(p.ids) <= budget), key=lambda p: len(p.ids), default=None)
            if best is not None:
                paragraphs[-1].append(best) if paragraphs else paragraphs.append([best])
                budget -= len(best.ids)
        return paragraphs


class CodeFiller:
    """Filler of generated Python functions and constants, each preceded by a blank line; `encode` measures lengths."""

    def __init__(self, rng: Rng, encode: Encode) -> None:
        self._rng, self._encode = rng, encode

    def _constant(self) -> str:
        return f"{code.name(self._rng).upper()} = {vocabulary.digits(self._rng, 3)}"

    def paragraphs(self, budget: int, sentences: int) -> list[list[Piece]]:
        """See :meth:`Filler.paragraphs`. A paragraph is one piece, a function or constant; `sentences` is ignored."""
        paragraphs: list[list[Piece]] = []
        while budget > 400:
            texts = ["\n\n" + code.function(self._rng) for _ in range(max(1, budget // 400))]
            for text, ids in zip(texts, self._encode(texts), strict=True):
                if len(ids) <= budget:
                    paragraphs.append([Piece(text, ids)])
                    budget -= len(ids)
        for _ in range(60):
            if budget <= SLACK + 4:
                break
            texts = ["\n\n" + self._constant()]
            ids = self._encode(texts)[0]
            if len(ids) <= budget:
                paragraphs.append([Piece(texts[0], ids)])
                budget -= len(ids)
        return paragraphs
