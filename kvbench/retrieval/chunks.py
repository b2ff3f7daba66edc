"""Which tokens of a prompt make chunks, and which text is searched for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: tokens at the end of a prompt that are the query where nothing else is known
LAST_TOKENS = 64


@dataclass(frozen=True)
class Chunked:
    """One prompt, cut.

    Args:
        first: token at which the first chunk begins (0 is the row's first real token).
        size: tokens of a chunk.
        texts: text of each full chunk, in order; the context's remainder of ``len mod size`` tokens is in none.
        query: what to search for.
        query_source: where it came from: ``input``, ``template`` (the prompt's own text after the context),
            ``last_chunk`` (the end of the context, a chunk long) or ``last_64_tokens`` (no context border is known: the
            context is everything before them).
    """

    first: int
    size: int
    texts: tuple[str, ...]
    query: str
    query_source: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Half-open token range of each chunk."""
        return [(self.first + i * self.size, self.first + (i + 1) * self.size) for i in range(len(self.texts))]


def cut(
    ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    size: int,
    context: tuple[int, int] | None = None,
    query: str = "",
    otherwise: str | None = None,
) -> Chunked:
    """Cut a prompt's context into chunks of `size` model tokens (Cocktail, sec. III-B).

    Args:
        ids: the prompt's token ids, without padding.
        decode: token ids to text.
        size: tokens of a chunk.
        context: half-open token range of the context, or None.
        query: the question's text; may be empty.
        otherwise: what to search for where `query` is empty and the context is known: ``template`` (None means it) or
            ``last_chunk``, for prompts whose text after the context says nothing (code to be completed).
    """
    if context is None:
        border = max(0, len(ids) - LAST_TOKENS)
        first, last = 0, border
        source = "input" if query.strip() else "last_64_tokens"
        query = query if query.strip() else decode(ids[border:])
    else:
        first, last = context
        source = "input" if query.strip() else otherwise or "template"
        if source == "last_chunk":
            query = decode(ids[max(first, last - size) : last])
        elif source == "template":
            query = decode(ids[last:])
    count = (last - first) // size
    texts = tuple(decode(ids[first + i * size : first + (i + 1) * size]) for i in range(count))
    return Chunked(first, size, texts, query, source)
