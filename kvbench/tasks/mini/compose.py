"""From a draft to a text of a given length: filler around the records, the wrapper around both, and all the spans.

A text is put together from pieces that are tokenized one by one. Every piece but the first begins with whitespace and
none ends with it, so that the tokens of the pieces are the tokens of the whole: a byte-level tokenizer's
pre-tokenizer never joins a non-space with the space after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import DataError
from kvbench.tasks.mini.draft import Draft
from kvbench.tasks.mini.filler import Encode, Filler, Piece
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.templates import Wrapper


class TooShort(DataError):
    """The records alone are longer than the sample may be."""


@dataclass(frozen=True)
class Document:
    """A wrapper's head and a context, and what may follow them.

    Args:
        pieces: head and context.
        context_span: characters of the text that are the context.
        places: by record, the character of the text at which it begins.
        tails: by question, what follows: the wrapper's tail and the question's prompt.
    """

    pieces: list[Piece]
    context_span: tuple[int, int]
    places: list[int]
    tails: list[str]

    @property
    def text(self) -> str:
        """Head and context."""
        return "".join(piece.text for piece in self.pieces)


def tails(draft: Draft, wrapper: Wrapper) -> list[str]:
    """By question, what stands between the context and the answer."""
    tail = f"\n\n{wrapper.tail}" if wrapper.tail else ""
    return [tail + question.prompt for question in draft.questions]


def compose(draft: Draft, wrapper: Wrapper, filler: Filler, encode: Encode, rng: Rng, room: int) -> Document:
    """Hide the draft's records in filler at places drawn evenly over the context.

    Args:
        draft: the task's records and questions.
        wrapper: what stands around the context.
        filler: what stands between the records.
        encode: the tokenizer, which measures.
        rng: where the places come from.
        room: tokens for head and context together.

    Raises:
        TooShort: head and records alone need more than `room` tokens.
    """
    gap = "\n\n" if draft.code else "\n"
    fixed = [wrapper.head, *(gap + record for record in draft.records), *([draft.closing] if draft.closing else [])]
    ids = encode(fixed)
    left = room - sum(map(len, ids))
    if left < 0:
        raise TooShort(f"a sample of {room} tokens has no room for its {len(draft.records)} records ({room - left})")
    head = Piece(fixed[0], ids[0], "fixed")
    records = [Piece(text, i, "record") for text, i in zip(fixed[1:], ids[1:], strict=True)][: len(draft.records)]
    # short paragraphs where there are many records, so that they do not lie together
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
