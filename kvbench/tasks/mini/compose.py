"""Composition of prompts of a given length: records between filler, with instructions around both.

A text is composed of pieces that are tokenized separately. Every piece except the first begins with whitespace, and
none ends with it. A byte-level pre-tokenizer never joins a non-space character with a space after it, so the tokens of
all pieces together are those of the complete text.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import DataError
from kvbench.tasks.mini.draft import Draft
from kvbench.tasks.mini.filler import Encode, Filler, Piece
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.templates import Wrapper


class TooShort(DataError):
    """Error for a sample that is too short to hold the first instruction and the records, even without filler."""


@dataclass(frozen=True)
class Document:
    """The beginning of a sample's prompts (an instruction and the context), and one ending per question.

    Args:
        pieces: pieces of the instruction and the context, in order.
        context_span: half-open character range of the context in :attr:`text`.
        places: for each record of the sample, the index in :attr:`text` of its first character.
        tails: for each question, the end of the prompt: any second instruction, then the question.
    """

    pieces: list[Piece]
    context_span: tuple[int, int]
    places: list[int]
    tails: list[str]

    @property
    def text(self) -> str:
        """The instruction and the context as one text."""
        return "".join(piece.text for piece in self.pieces)


def tails(draft: Draft, wrapper: Wrapper) -> list[str]:
    """Return, for each question of a sample, the part of the prompt after the context.

    Args:
        draft: the records and questions of a sample.
        wrapper: instructions around the context.
    """
    tail = f"\n\n{wrapper.tail}" if wrapper.tail else ""
    return [tail + question.prompt for question in draft.questions]


def compose(draft: Draft, wrapper: Wrapper, filler: Filler, encode: Encode, rng: Rng, room: int) -> Document:
    """Return a document of a given length in which the sample's records are hidden between paragraphs of filler.

    The positions of the records are drawn uniformly over the context.

    Args:
        draft: the records and questions of the sample.
        wrapper: instructions around the context.
        filler: source of the paragraphs between the records.
        encode: tokenizer that measures lengths.
        rng: source of random numbers for the positions.
        room: maximum number of tokens of the instruction and the context together.

    Raises:
        TooShort: the instruction and the records exceed `room` tokens even without filler.
    """
    gap = "\n\n" if draft.code else "\n"
    fixed = [wrapper.head, *(gap + record for record in draft.records), *([draft.closing] if draft.closing else [])]
    ids = encode(fixed)
    left = room - sum(map(len, ids))
    if left < 0:
        raise TooShort(
            f"a sample of {room} tokens is too short for its {len(draft.records)} records, which take "
            f"{room - left} tokens"
        )
    head = Piece(fixed[0], ids[0], "fixed")
    records = [Piece(text, i, "record") for text, i in zip(fixed[1:], ids[1:], strict=True)][: len(draft.records)]
    # many records need short paragraphs, or several of them would be adjacent
    sentences = max(1, min(4, left // (20 * (len(records) + 6))))
    paragraphs = filler.paragraphs(left, sentences)
    order = list(range(len(records)))
    if not draft.ordered:
        rng.shuffle(order)
    gaps = sorted(rng.below(len(paragraphs) + 1) for _ in records)
    pieces = [head]
    at = len(head.text)
    places = [0] * len(records)
    for i in range(len(paragraphs) + 1):
        while gaps and gaps[0] == i:
            gaps.pop(0)
            which = order.pop(0)
            places[which] = at + len(gap)
            pieces.append(records[which])
            at += len(records[which].text)
        if i < len(paragraphs):
            pieces += paragraphs[i]
            at += sum(len(piece.text) for piece in paragraphs[i])
    if draft.closing:
        pieces.append(Piece(draft.closing, ids[-1], "record"))
        at += len(draft.closing)
    first = pieces[1].text if len(pieces) > 1 else ""
    start = len(head.text) + len(first) - len(first.lstrip())
    return Document(pieces, (start, at), places, tails(draft, wrapper))
