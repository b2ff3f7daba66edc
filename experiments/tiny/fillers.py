"""Corpus text as filler and as a source of sentences, cut from the token arrays without tokenizing anything again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from experiments.tiny.corpus import Tokens
from kvbench.tasks.mini.filler import SLACK, Encode, Piece
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.tokens import encoder


class Library:
    """The corpus with the places where it can be cut; made once, shared by all workers."""

    def __init__(self, tokens: Tokens, tokenizer: Path) -> None:
        self.tokens = tokens
        self.encode: Encode = encoder(tokenizer)
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        size = self.tokenizer.get_vocab_size()
        texts = [self.tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
        self.spaced = np.array([bool(t) and t[0].isspace() for t in texts])
        ends_spaced = np.array([bool(t) and t[-1].isspace() for t in texts])
        ends_sentence = np.array([t.rstrip("\"'”’)")[-1:] in (".", "!", "?") for t in texts])
        newline = np.array([t.startswith("\n") for t in texts])
        self.end_of_text = self.tokenizer.token_to_id("</s>")
        self.sentences = self._borders(tokens.prose, ends_sentence, self.spaced)
        self.lines = self._borders(tokens.code, ~ends_spaced, newline)

    @staticmethod
    def _borders(tokens: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        if len(tokens) < 2:
            return np.zeros(0, np.int64)
        return np.flatnonzero(before[tokens[:-1]] & after[tokens[1:]]) + 1

    def text(self, ids: np.ndarray) -> str:
        """Return the text of some tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def row(self, rng: Rng, length: int, code: bool) -> np.ndarray:
        """Return `length` consecutive tokens from a random place."""
        source = self.tokens.code if code and len(self.tokens.code) > length else self.tokens.prose
        start = rng.below(len(source) - length)
        return source[start : start + length]


class _Drawn:
    """Text from random places of a corpus."""

    def __init__(self, library: Library, rng: Rng) -> None:
        self._library, self._rng = library, rng


class CorpusFiller(_Drawn):
    """Consecutive sentences of a random place in the prose."""

    def _slices(self, budget: int) -> list[np.ndarray]:
        library, slices, misses = self._library, [], 0
        borders = library.sentences
        at = self._rng.below(len(borders) - 1)
        while budget > SLACK and misses < 64:
            if at + 1 >= len(borders):
                at = 0
            part = library.tokens.prose[borders[at] : borders[at + 1]]
            at += 1
            if len(part) > min(budget, 160) or (part == library.end_of_text).any():
                misses += 1
                if len(part) > budget:  # near the end a shorter sentence may be anywhere
                    at = self._rng.below(len(borders) - 1)
                continue
            slices.append(part)
            budget -= len(part)
        return slices

    def paragraphs(self, budget: int, sentences: int) -> list[list[Piece]]:
        """As :class:`kvbench.tasks.mini.filler.Filler`; the pieces have ids and no text."""
        library = self._library
        # a paragraph's opening is tokenized again without its space, which may cost a token or two more
        parts = self._slices(budget - 2 * max(1, budget // (24 * sentences)))
        starts, rests = [], []
        for part in parts[::sentences]:
            spaced = np.flatnonzero(library.spaced[part])
            words = spaced[spaced > 0]
            cut = next((int(i) for i in words if library.text(part[:i]).strip()), len(part))
            starts.append("\n" + " ".join(library.text(part[:cut]).split()))
            rests.append(part[cut:].tolist())
        openings = [ids + rest for ids, rest in zip(library.encode(starts), rests, strict=True)] if starts else []
        pieces = []
        for i, opening in enumerate(openings):
            others = parts[i * sentences + 1 : (i + 1) * sentences]
            pieces.append([Piece("", opening)] + [Piece("", part.tolist()) for part in others])
        while pieces and sum(len(p.ids) for paragraph in pieces for p in paragraph) > budget:
            pieces.pop()
        return pieces


class CorpusCodeFiller(_Drawn):
    """Consecutive lines of a random place in the code."""

    def paragraphs(self, budget: int, sentences: int) -> list[list[Piece]]:
        """As :class:`kvbench.tasks.mini.filler.Filler`, in stretches of about 40 tokens a sentence, without text."""
        library, pieces = self._library, []
        borders = library.lines
        at, misses = self._rng.below(len(borders) - 1), 0
        while budget > SLACK and misses < 64:
            wanted = borders[at] + min(40 * sentences, budget)
            end = int(np.searchsorted(borders, wanted, side="right")) - 1
            part = library.tokens.code[borders[at] : borders[end]] if end > at else np.zeros(0, np.uint16)
            if end <= at or (part == library.end_of_text).any():
                misses += 1
                at = self._rng.below(len(borders) - 1)
                continue
            pieces.append([Piece("", part.tolist())])
            budget -= len(part)
            at = end if end < len(borders) - 1 else 0
        return pieces


class CorpusWriter(_Drawn):
    """Sentences of the corpus as text, for tasks that quote or copy; whitespace is made single spaces."""

    def sentence(self) -> str:
        """Return a sentence of 6 to 60 tokens."""
        borders, prose = self._library.sentences, self._library.tokens.prose
        while True:
            at = self._rng.below(len(borders) - 1)
            part = prose[borders[at] : borders[at + 1]]
            if 6 <= len(part) <= 60 and not (part == self._library.end_of_text).any():
                text = " ".join(self._library.text(part).split())
                if text and text[0].isalnum():
                    return text

    def passage(self, n_words: int) -> str:
        """Return sentences of about `n_words` words."""
        parts: list[str] = []
        count = 0
        while count < n_words:
            parts.append(self.sentence())
            count += parts[-1].count(" ") + 1
        return " ".join(parts)
