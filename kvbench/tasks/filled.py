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
    """Prompts of equal length, one for each sequence of a batch.

    Args:
        ids: token ids of each prompt.
        contexts: half-open token range of the context in each prompt.
        queries: text of the question about each prompt.
    """

    ids: list[list[int]]
    contexts: list[tuple[int, int]]
    queries: list[str]


def filled(tokenizer: Any, count: int, rows: int, seed: int = 0) -> Filled:
    """Return `rows` prompts of exactly `count` tokens each.

    If the question would fill more than half of a prompt, the prompt consists of sentences only. The last quarter of
    its tokens is then not part of the context, and the question is only in `queries`.

    Args:
        tokenizer: the model's tokenizer.
        count: number of tokens of each prompt, including the beginning-of-sequence token.
        rows: number of prompts. Prompt number i is the same for every value of `rows`.
        seed: seed of the random sentences and their order.

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
