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
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.base import Sample, Setup
from kvbench.tasks.data import HubSource
from kvbench.tasks.texts import TextTask, check_text
from kvbench.tasks.work import ScoreText
from kvbench.util.schema import MOST_TOKENS, bounded

#: number of spans that GPTQ and the papers after it draw from C4
C4_WINDOWS = 256


@dataclass(kw_only=True)
class Perplexity(TextTask):
    """Data set that measures the perplexity of a text, cut into spans of a fixed number of tokens.

    Args:
        text: the text to measure: ``wikitext2``; ``c4`` (256 spans drawn at random with seed 0, as in Atom and
            KVQuant); ``c4_new`` (the first 256 spans of C4's first 1,100 documents, joined); ``pg19`` (books); ``text``
            (your own files, at `path`); or ``mini_text`` (texts that come with Python).
        path: a local file or folder; None downloads from the hub.
        mode: how a span's likelihood is measured. ``decode`` feeds the span token by token through the method's cache,
            as an answer would be. ``simulated`` runs one forward pass in which all keys and values are quantized as the
            method would quantize a prompt; this is how papers measure. ``fp16`` runs one forward pass without a cache.
        window: number of tokens per span.
        stride: number of tokens from the beginning of one span to the beginning of the next; None for `window`, so that
            spans do not overlap. If it is smaller than `window`, each span repeats the end of the span before it as
            context, and only its last `stride` tokens are scored (in the first span of a document, all).
        limit: largest number of spans; None for all.
        per_document: largest number of spans from each document; None for all.
        skip: number of tokens to skip at the beginning of each document.
        prefill: number of tokens at the beginning of each span that are cached as a prompt and not scored. Cocktail
            needs such a prompt, because it quantizes nothing but prompt tokens.
        chunk: number of tokens per span and forward pass with ``mode=decode``; ``auto`` for 128, or 512 on a GPU. It
            affects only speed: for methods that change the cache while decoding, each token of a pass still sees the
            others in the form that they would have had in decoding token by token.
        bos: True to replace the first token of each span by the beginning-of-sequence token.
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
        """Raise ConfigError if `path` is missing, `source` is malformed, or `stride` or `prefill` is too large.

        For the text ``c4``, whose spans are drawn at random, `stride` must be None or equal to `window`.
        """
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
        """Raise ConfigError if a span is longer than ``model.max_length``, or if the method does not support `mode`."""
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

    def samples(self) -> Iterator[Sample]:
        """Yield one sample per span, until `limit` is reached; the numbers in their ids continue across documents.

        Raises:
            DataError: no document is long enough for a span.
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
        """Return the texts' checksum, and the options that shape the spans.

        The tokenizer also affects the spans, but it is part of the model's identity.
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
        """Return facts to store with the results: `mode`, and the number of characters of all documents."""
        return {"mode": self.mode, "characters": sum(map(len, self.documents))}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return no scores: the result of a span is its likelihood, and no text is generated that could be scored."""
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
