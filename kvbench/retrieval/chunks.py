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
    """One prompt, cut into chunks.

    Args:
        first: token at which the first chunk begins (0 is the row's first real token).
        size: tokens of a chunk.
        texts: text of each full chunk, in order; the context's last ``len mod size`` tokens belong to none.
        query: what to search for.
        query_source: origin of the query: ``input``, ``template`` (the prompt's own text after the context),
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
        """Half-open token ranges of the chunks."""
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
    """Cut a prompt's context into chunks of `size` model tokens (Cocktail, sec. III-B).

    Args:
        ids: the prompt's token ids, without padding.
        decode: token ids to text.
        size: tokens of a chunk.
        context: half-open token range of the context, or None.
        query: the question's text; may be empty.
        otherwise: what to search for if `query` is empty and the context is known. ``template``: the prompt's text
            after the context. ``last_chunk``: the last `size` tokens of the context, for prompts without a question
            after it, such as code to complete. None: ``template``.
        whole_words: if True, a word that a chunk boundary splits appears in full in the text of both chunks
            (:func:`text_in_words`). This affects only the text that is searched, not which tokens belong to a chunk.

    Returns:
        The chunks with their texts, the query, and where the query came from.
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
    """Return the text of the tokens `span`, with the rest of the words that its ends cut.

    A word is what stands between white space. Where its end is not found within :data:`REACH` tokens of the context
    (text without spaces), or the tokens do not decode alone (half a character), that end stays as it is.

    Args:
        ids: the prompt's token ids.
        decode: token ids to text.
        span: half-open token range of the chunk.
        context: half-open token range beyond which nothing is taken.
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
