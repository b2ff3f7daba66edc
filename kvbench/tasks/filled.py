"""Prompts of an exact number of tokens: real sentences, then a question about one of them.

Memory and time of a cache do not depend on what a prompt says, but a method may look at it (Cocktail cuts the context
into chunks and searches them), so the text is made of words, and every row of a batch has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import DataError
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng

#: words of the question; what it asks for follows
QUESTION = ("\n\nQuestion: what is said about the word '", "'?\nAnswer:")

#: fewest sentences that rows are made of: so many rows begin with different ones
LEAST = 64


@dataclass(frozen=True)
class Filled:
    """Equally long prompts.

    Args:
        ids: token ids of each row.
        contexts: half-open token range of each row's context.
        queries: the question of each row.
    """

    ids: list[list[int]]
    contexts: list[tuple[int, int]]
    queries: list[str]


def filled(tokenizer: Any, count: int, rows: int, seed: int = 0) -> Filled:
    """Return `rows` prompts of exactly `count` tokens; a row does not depend on how many others there are.

    A prompt too short for its question (fewer than twice the question's tokens) is context throughout, but for its last
    quarter; the question then stands in `queries` alone.

    Args:
        tokenizer: of the model.
        count: tokens of each prompt, the beginning-of-sequence token included.
        rows: prompts.
        seed: another seed, other prompts.

    Raises:
        DataError: the tokenizer makes no tokens of words.
    """
    head = _beginning(tokenizer)[: count - 1]
    texts, pieces = _pool(tokenizer, count, seed)
    prompts = Filled([], [], [])
    for row in range(rows):
        rng = Rng("filled", seed, count, row)
        own = row % len(pieces)  # comes first
        order = [number for number in range(len(pieces)) if number != own]
        rng.shuffle(order)
        order.insert(0, own)
        word = max(texts[order[0]].strip(" .,;").split(), key=len).strip(".,;")
        query = f"what is said about the word '{word}'?"
        tail = list(tokenizer(QUESTION[0] + word + QUESTION[1], add_special_tokens=False)["input_ids"])
        if 2 * len(tail) > count:
            tail = []
        room = count - len(head) - len(tail)
        body: list[int] = []
        for number in order:
            body += pieces[number]
            if len(body) >= room:
                break
        last = len(head) + (room if tail else max(1, room - room // 4))
        prompts.ids.append([*head, *body[:room], *tail])
        prompts.contexts.append((len(head), last))
        prompts.queries.append(query)
    return prompts


def _beginning(tokenizer: Any) -> list[int]:
    """Return the token that the tokenizer puts before a text, if any."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [first] if first is not None and list(tokenizer("")["input_ids"][:1]) == [first] else []


def _pool(tokenizer: Any, count: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """Return sentences, none twice, with their tokens: at least `count` tokens together."""
    prose = Prose(Rng("filled", seed))
    texts: list[str] = []
    pieces: list[list[int]] = []
    total = 0
    while total < count:
        new = [" " + prose.sentence() for _ in range(max(LEAST, (count - total) // 64))]
        ids = tokenizer(new, add_special_tokens=False)["input_ids"]
        texts += new
        pieces += [list(piece) for piece in ids]
        added = sum(map(len, ids))
        if not added:
            raise DataError(f"{type(tokenizer).__name__} makes no tokens of {new[0]!r}: a prompt cannot be filled")
        total += added
    return texts, pieces
