"""Division of a prompt's context into chunks, choice of the query, and the search for each chunk's bit width.

Source: Cocktail (Tao et al., DATE 2025), sec. III-B, eq. 1-3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: tokens at the end of a prompt that serve as the query if no other is known
LAST_TOKENS = 64
#: tokens beyond a chunk's border that are searched for the rest of a cut word
REACH = 16


@dataclass(frozen=True)
class Chunked:
    """A prompt whose context has been cut into chunks, with the text to search for in them.

    Args:
        first: index of the first token of the first chunk in the prompt, not counting padding.
        size: number of tokens per chunk.
        texts: text of each chunk, in order. The last tokens of the context are in no chunk if they do not fill one.
        query: text to search for.
        query_source: where `query` comes from. ``input``: the sample's question. ``template``: the prompt's text after
            the context. ``last_chunk``: the last `size` tokens of the context. ``last_64_tokens``: the last 64 tokens
            of a prompt whose context is unknown.
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


def cut_chunks(
    ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    size: int,
    context: tuple[int, int] | None = None,
    query: str = "",
    otherwise: str | None = None,
    whole_words: bool = False,
) -> Chunked:
    """Cut a prompt's context into chunks of `size` tokens, and choose the text to search for (Cocktail, sec. III-B).

    Args:
        ids: the prompt's token ids, without padding.
        context: half-open token range of the context. None if it is unknown; all tokens but the last 64 are then
            treated as the context, and the last 64 are searched for if `query` is empty.
        query: text of the question; may be empty.
        otherwise: what to search for if `query` is empty and the context is known. ``template`` or None: the prompt's
            text after the context. ``last_chunk``: the last `size` tokens of the context, for prompts without a
            question after the context, such as code to complete.
        whole_words: True to complete words that a chunk boundary splits, so that they appear in full in the texts of
            both chunks. The token ranges of the chunks stay the same.
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

    Words are separated by whitespace. A word stays incomplete if it extends more than :data:`REACH` tokens beyond the
    chunk, or if a character at the boundary is split between two tokens. Tokens outside `context` are not used.
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
        if front == before and begin > context[0]:  # the word begins before the tokens that were decoded
            front = ""
    after = decode(ids[begin:end])
    if text and not text[-1].isspace() and after.startswith(until):
        rest = after[len(until) :]
        back = re.findall(r"\A\S*", rest)[0]
        if back == rest and end < context[1]:
            back = ""
    return front + text + back


#: bit widths from the least to the most similar chunk
LOW, MIDDLE, FULL = 2, 4, 16


@dataclass(frozen=True)
class Widths:
    """Bit widths of the chunks of one context.

    Args:
        bits: bits per element of each chunk: 2, 4 or 16 (full precision).
        t_low: the threshold below which a chunk's score gave it 2 bits; None if the widths were chosen by rank.
        t_high: the threshold above which a chunk's score gave it 16 bits; None if the widths were chosen by rank.
    """

    bits: tuple[int, ...]
    t_low: float | None
    t_high: float | None

    def count(self, bits: int) -> int:
        """Return the number of chunks with a bit width of `bits`."""
        return self.bits.count(bits)


def by_threshold(scores: Sequence[float], alpha: float, beta: float) -> Widths:
    """Choose bit widths by comparing scores with two thresholds (Cocktail, eq. 2 and 3).

    The thresholds are ``T_low = s_min + (s_max - s_min) alpha`` and ``T_high = s_max - (s_max - s_min) beta``. A chunk
    gets 2 bits if its score is below T_low, 16 bits if it is above T_high, and 4 bits otherwise. A single chunk
    therefore gets 4 bits, as do chunks that all have the same score; with beta = 0, no chunk gets 16 bits.
    """
    if not scores:
        return Widths((), None, None)
    low, high = min(scores), max(scores)
    t_low, t_high = low + (high - low) * alpha, high - (high - low) * beta
    return Widths(tuple(LOW if s < t_low else FULL if s > t_high else MIDDLE for s in scores), t_low, t_high)


def by_rank(scores: Sequence[float], shares: Sequence[float]) -> Widths:
    """Choose bit widths by rank: fixed shares of the chunks get 16, 4 and 2 bits, whatever the scores are.

    The most similar chunks get 16 bits, the next ones 4 bits and the rest 2 bits. Of two chunks with the same score,
    the earlier one ranks higher. The size of the cache therefore does not depend on the scores.

    The shares are those of 16, 4 and 2 bits; they need not sum to 1.
    """
    total, n = sum(shares), len(scores)
    full = round(n * shares[0] / total)
    middle = min(round(n * (shares[0] + shares[1]) / total), n) - full
    ranked = sorted(range(n), key=lambda i: (-scores[i], i))
    bits = [LOW] * n
    for place, chunk in enumerate(ranked[: full + middle]):
        bits[chunk] = FULL if place < full else MIDDLE
    return Widths(tuple(bits), None, None)


def shuffled(widths: Widths, seed: str) -> Widths:
    """Return the same bit widths in random order: Cocktail's ablation in which the search (module I) is left out."""
    bits = list(widths.bits)
    random.Random(seed).shuffle(bits)
    return Widths(tuple(bits), widths.t_low, widths.t_high)
