"""Texts of a given length made from drafts: records within filler, with a wrapper around both, and all spans.

A text is composed of pieces that are tokenized separately. Every piece but the first begins with whitespace, and none
ends with it, so the tokens of the pieces are those of the whole text: a byte-level pre-tokenizer never joins a
non-space character with a space after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import DataError
from kvbench.tasks.mini.draft import Draft
from kvbench.tasks.mini.filler import Encode, Filler, Piece
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.templates import Wrapper


class TooShort(DataError):
    """Error for a sample that is too short to hold the wrapper's head and its records, even without filler."""


@dataclass(frozen=True)
class Document:
    """A wrapper's head and a context, and the texts that may follow them.

    Args:
        pieces: pieces of the head and the context.
        context_span: half-open character range of the context in the text.
        places: for each record, the character of the text at which it begins.
        tails: for each question, the text after the context: the wrapper's tail and the question's prompt.
    """

    pieces: list[Piece]
    context_span: tuple[int, int]
    places: list[int]
    tails: list[str]

    @property
    def text(self) -> str:
        """The head and the context as one text."""
        return "".join(piece.text for piece in self.pieces)


def tails(draft: Draft, wrapper: Wrapper) -> list[str]:
    """Return, for each question, the text between the context and the answer."""
    tail = f"\n\n{wrapper.tail}" if wrapper.tail else ""
    return [tail + question.prompt for question in draft.questions]


def compose(draft: Draft, wrapper: Wrapper, filler: Filler, encode: Encode, rng: Rng, room: int) -> Document:
    """Return a document in which the draft's records are hidden at random places in filler.

    The places, between paragraphs of filler, are drawn uniformly over the context.

    Args:
        draft: the task's records and questions.
        wrapper: text around the context.
        filler: source of the text between the records.
        encode: the tokenizer by which lengths are measured.
        rng: source of random numbers for the places.
        room: maximum number of tokens of the head and the context together.

    Raises:
        TooShort: the head and the records need more than `room` tokens even without filler.
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
