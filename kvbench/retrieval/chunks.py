"""Division of a prompt's context into chunks, and choice of the query."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: tokens at the end of a prompt that serve as the query if no other is known
LAST_TOKENS = 64
#: tokens beyond a chunk's border that are searched for the rest of a cut word
REACH = 16


@dataclass(frozen=True)
class Chunked:
    """One prompt whose context is cut into chunks.

    Args:
        first: index of the first chunk's first token in the prompt, not counting padding.
        size: number of tokens per chunk.
        texts: text of each chunk, in order. Tokens at the end of the context that do not fill a chunk are left out.
        query: text to search for.
        query_source: origin of the query. ``input`` is the question that the sample gives, ``template`` the prompt's
            text after the context, and ``last_chunk`` the last `size` tokens of the context. ``last_64_tokens`` is the
            end of a prompt without a known context; everything before it then counts as the context.
    """

    first: int
    size: int
    texts: tuple[str, ...]
    query: str
    query_source: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Half-open token ranges of the chunks in the prompt."""
        return [(self.first + i * self.size, self.first + (i + 1) * self.size) for i in range(len(self.texts))]


def cut(
    ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    size: int,
    context: tuple[int, int] | None = None,
    query: str = "",
    otherwise: str | None = None,
    whole_words: bool = False,
) -> Chunked:
    """Cut a prompt's context into chunks of `size` tokens, and choose the query (Cocktail, sec. III-B).

    Args:
        ids: the prompt's token ids, without padding.
        decode: function that converts token ids to text.
        size: number of tokens per chunk.
        context: half-open token range of the context; None if it is unknown.
        query: text of the question; may be empty.
        otherwise: which text to use as the query if `query` is empty and the context is known: ``template`` or None
            for the prompt's text after the context, or ``last_chunk`` for the last `size` tokens of the context. The
            latter is for prompts without a question after the context, such as code to complete.
        whole_words: if True, a word that a chunk boundary splits appears in full in the texts of both chunks. The
            tokens of the chunks stay the same.
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
    spans = [(first + i * size, first + (i + 1) * size) for i in range(count)]
    if whole_words:
        texts = tuple(text_in_words(ids, decode, span, (first, last)) for span in spans)
    else:
        texts = tuple(decode(ids[start:stop]) for start, stop in spans)
    return Chunked(first, size, texts, query, source)


def text_in_words(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], span: tuple[int, int], context: tuple[int, int]
) -> str:
    """Return the text of a chunk, with its first and last word completed from the tokens around the chunk.

    Words are separated by whitespace. A word is not completed if no whitespace is found within :data:`REACH` tokens
    beyond the chunk, or if a character is split between tokens.

    Args:
        ids: the prompt's token ids.
        decode: function that converts token ids to text.
        span: half-open token range of the chunk.
        context: half-open token range of the context; words are completed only from tokens in it.
    """
    start, stop = span
    begin, end = max(context[0], start - REACH), min(context[1], stop + REACH)
    # decoded together with what stands before: alone, some tokenizers drop the space in front
    before, until = decode(ids[begin:start]), decode(ids[begin:stop])
    if not until.startswith(before):
        before, until, begin = "", decode(ids[start:stop]), start
    text = until[len(before) :]
    front = back = ""
    if text and not text[0].isspace():
        front = re.findall(r"\S*\Z", before)[0]
        if front == before and begin > context[0]:
            front = ""
    after = decode(ids[begin:end])
    if text and not text[-1].isspace() and after.startswith(until):
        rest = after[len(until) :]
        back = re.findall(r"\A\S*", rest)[0]
        if back == rest and end < context[1]:
            back = ""
    return front + text + back
