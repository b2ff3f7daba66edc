"""Prompts with an exact number of tokens: generated English sentences, then a question about one of them.

The memory and time of most caches do not depend on the content of a prompt, but a method may use the content, as
Cocktail does when it searches the context. The prompts therefore consist of words, and each prompt of a batch is
different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import DataError
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng

#: text of the question before and after the word that it asks about
QUESTION = ("\n\nQuestion: what is said about the word '", "'?\nAnswer:")

#: minimum number of sentences to choose from, so that at least this many rows begin differently
LEAST = 64


@dataclass(frozen=True)
class Filled:
    """Prompts of the same length for the sequences of one batch.

    Each has token ids, the half-open token range of its context, and the text of the question.
    """

    ids: list[list[int]]
    contexts: list[tuple[int, int]]
    queries: list[str]


def filled_prompts(tokenizer: Any, count: int, rows: int, seed: int = 0) -> Filled:
    """Return prompts of exactly `count` tokens: random sentences as the context, then a question about one of them.

    If the question would take up more than half of a prompt, it is left out of the prompt and appears only in
    `queries`. The last quarter of such a prompt does not count as context. `count` includes the beginning-of-sequence
    token. A larger number of rows only adds prompts at the end.

    Raises:
        DataError: the tokenizer returns no tokens for words.
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
    """Return the beginning-of-sequence token if the tokenizer puts it before a text, else an empty list."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [first] if first is not None and list(tokenizer("")["input_ids"][:1]) == [first] else []


def _pool(tokenizer: Any, count: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """Return distinct sentences and the token ids of each, at least `count` tokens in total."""
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
            raise DataError(
                f"{type(tokenizer).__name__} returns no tokens for {new[0]!r}, so a prompt cannot be filled"
            )
        total += added
    return texts, pieces
