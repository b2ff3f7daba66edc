"""Perplexity as a task: a text is cut into spans of the model's tokens (papers call them windows), one per sample.

As in GPTQ, Atom, KVQuant and QuaRot, the whole text is tokenized at once, the spans do not overlap, and an incomplete
last span is dropped. The perplexity is computed from the mean over the spans of their mean negative log-likelihood.
There are three modes, recorded in every row:

- ``decode``: the span goes through the method's cache token by token, like an answer. Every token is predicted from
  what the cache really holds.
- ``simulated``: one forward pass in which all keys and values of the span are quantized as the method would quantize a
  prompt. Every token attends to these, including its own. The papers' tables are measured in this way, although no
  deployed cache works like this.
- ``fp16``: one forward pass without a cache, as the reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.tasks import data
from kvbench.tasks.base import Sample, Setup, TokenTask
from kvbench.tasks.data import HubSource
from kvbench.tasks.texts import DOCUMENTS, check_text
from kvbench.tasks.work import ScoreText
from kvbench.util.schema import MOST_TOKENS, bounded

#: number of spans that GPTQ and the papers after it draw from C4
C4_WINDOWS = 256


@dataclass(kw_only=True)
class Perplexity(TokenTask):
    """Perplexity of texts, measured on spans of a fixed number of tokens.

    Args:
        name: the data set's name in results.
        text: ``wikitext2``, ``c4`` (256 spans drawn with seed 0, as in Atom and KVQuant), ``c4_new`` (256 spans of the
            first 1,100 documents joined), ``pg19`` (books), ``text`` (files of `path`), or ``mini_text`` (texts that
            come with Python).
        path: a local file or folder; None reads from the hub.
        source: the file on the hub.
        mode: how the likelihood is measured. ``decode`` feeds the span through the method's cache token by token.
            ``simulated`` is one forward pass in which all keys and values are quantized as the method would quantize
            a prompt. ``fp16`` is one forward pass without a cache.
        window: number of tokens per span.
        stride: number of tokens from the beginning of one span to the next. If it is below `window`, the spans overlap,
            and only the last `stride` tokens of a span are scored, except in a document's first span. None for no
            overlap.
        limit: number of spans; None for all.
        per_document: maximum number of spans per document; None for all.
        skip: number of tokens skipped at the beginning of each document.
        prefill: number of tokens at the beginning of each span that form a prompt and are not scored. Cocktail needs
            such a prompt, because it quantizes only prompt tokens.
        chunk: number of tokens per forward pass in ``decode``; ``auto`` for 128. The result does not depend on it,
            because attention takes the tokens one by one if the method changes the cache while decoding.
        bos: whether the first token of each span is replaced by the beginning-of-sequence token.
    """

    version = 1
    scorer_version = 1

    name: str = "perplexity"
    text: Literal["wikitext2", "c4", "c4_new", "pg19", "text", "mini_text"] = "wikitext2"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    mode: Literal["decode", "simulated", "fp16"] = "decode"
    window: int = bounded(2048, minimum=8, maximum=MOST_TOKENS)
    stride: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    limit: int | None = bounded(None, minimum=1)
    per_document: int | None = bounded(None, minimum=1)
    skip: int = bounded(0, minimum=0)
    prefill: int = bounded(0, minimum=0, maximum=MOST_TOKENS)
    chunk: int | Literal["auto"] = bounded("auto", minimum=1)
    bos: bool = False

    def check(self) -> None:
        """Raise ConfigError for spans without scored tokens, an invalid stride or source, or a missing path."""
        self.source.check()
        check_text(self.text, self.path)
        if self.stride is not None and self.stride > self.window:
            raise ConfigError(
                "dataset.stride", self.stride, f"would skip tokens, because it exceeds dataset.window={self.window}"
            )
        if self.prefill >= self.window:
            raise ConfigError(
                "dataset.prefill", self.prefill, f"leaves no tokens to score, because dataset.window={self.window}"
            )
        if self.text == "c4" and self.stride not in (None, self.window):
            raise ConfigError(
                "dataset.stride",
                self.stride,
                "must be null for dataset.text=c4, whose windows are drawn at random and do not slide",
            )

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if a span exceeds ``model.max_length``, or the mode cannot measure the method."""
        longest = config.model.max_length
        if self.window > longest:
            raise ConfigError(
                "dataset.window",
                self.window,
                f"exceeds the model's limit (model.max_length={longest})",
                allowed=f"8 to {longest}",
                hint=f"dataset.window={longest}",
            )
        config.method.alone().check_windows(self.mode, self.prefill)

    @cached_property
    def documents(self) -> list[str]:
        """The texts from which spans are cut, read on first use. Raises DataError if they cannot be read."""
        return DOCUMENTS[self.text](self.source, self.path)

    @cached_property
    def checksum(self) -> str:
        """Checksum of the texts (see :func:`kvbench.tasks.data.fingerprint`)."""
        return data.fingerprint(({"text": text} for text in self.documents), ("text",))

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield a pair per file to download: its source on the hub, and the name that replaces ``{task}`` there."""
        return iter(() if self.source.hub_id is None else ((self.source, "test"),))

    def samples(self) -> Iterator[Sample]:
        """Yield one sample per span, numbered through all documents.

        Raises:
            DataError: no document is as long as a span.
        """
        windows = self._drawn() if self.text == "c4" else self._cut()
        count = 0
        for count, (document, ids, first, size) in enumerate(windows, start=1):
            yield self._sample(count - 1, document, ids, first, size)
            if count == (self.limit or (C4_WINDOWS if self.text == "c4_new" else None)):
                return
        if not count:
            raise DataError(
                f"{self.name}: no document has at least {self.window} tokens.\n  hint: reduce dataset.window"
            )

    def identity(self) -> dict[str, Any]:
        """Return JSON data for the identity of a run: the texts, and all options on which its spans and scores depend.

        Not included are :attr:`limit` (the number of spans) and the tokenizer, which belongs to the model.
        """
        settings = {key: getattr(self, key) for key in ("text", "mode", "window", "stride", "skip", "prefill", "bos")}
        return {
            "target": "perplexity",
            "version": self.version,
            "sha256": self.checksum,
            "documents": len(self.documents),
            "per_document": self.per_document,
            **settings,
        }

    def notes(self) -> dict[str, Any]:
        """Return what a run's results record about the data set: :attr:`mode`, and the length of the texts.

        The length is a number of characters.
        """
        return {"mode": self.mode, "characters": sum(map(len, self.documents))}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return no scores, because the result of a span is its likelihood, not a prediction."""
        return {}

    # -- windows: document, token ids, first scored token, bytes of the scored text ----------------------------------

    def _cut(self) -> Iterator[tuple[int, list[int], int, int]]:
        stride = self.stride or self.window
        for number, text in enumerate(self.documents):
            ids, offsets = self._tokens(text)
            starts = range(self.skip, len(ids) - self.window + 1, stride)
            for place, start in enumerate(starts[: self.per_document]):
                first = max(1, self.prefill, self.window - stride if place else 0)
                yield number, *self._window(text, ids, offsets, start, first)

    def _drawn(self) -> Iterator[tuple[int, list[int], int, int]]:
        draw = random.Random(0)
        tokens: dict[int, tuple[list[int], Sequence[tuple[int, int]]]] = {}
        for _ in range(C4_WINDOWS):
            for _ in range(100_000):
                number = draw.randint(0, len(self.documents) - 1)
                if number not in tokens:
                    tokens[number] = self._tokens(self.documents[number])
                # the original has `>=`, which fails if a document has exactly as many tokens
                if len(tokens[number][0]) > self.window:
                    break
            else:
                return
            ids, offsets = tokens[number]
            start = draw.randint(0, len(ids) - self.window - 1)
            yield number, *self._window(self.documents[number], ids, offsets, start, max(1, self.prefill))

    def _tokens(self, text: str) -> tuple[list[int], Sequence[tuple[int, int]]]:
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), encoded["offset_mapping"]

    def _window(
        self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]], start: int, first: int
    ) -> tuple[list[int], int, int]:
        window = ids[start : start + self.window]
        if self.bos:
            token = self.tokenizer.bos_token_id
            window[0] = window[0] if token is None else token
        begin, end = offsets[start + first][0], offsets[start + self.window - 1][1]
        return window, first, len(text[begin:end].encode("utf-8", "surrogatepass"))

    def _sample(self, index: int, document: int, ids: list[int], first: int, size: int) -> Sample:
        return Sample(
            id=f"{self.text}@{self.window}/{index}",
            task=self.text,
            length=self.window,
            prompt="",
            answers=(),
            max_new_tokens=1,
            work=ScoreText(tuple(ids), first, size, document, self.mode, self.prefill, self.chunk),
        )
