"""Perplexity as a task: a text cut into spans of the model's tokens (papers call them windows), one sample each.

Conventions (GPTQ, Atom, KVQuant, QuaRot): one tokenization of the whole text, windows side by side, the last partial
one dropped, and the mean of the windows' means. Three modes, named in every row:

- ``decode``: the window goes through the method's cache a token at a time, as an answer would; every token is predicted
  from what the cache really holds.
- ``simulated``: one forward pass in which all keys and values of the window are quantized as the method would quantize
  a prompt, and every token attends to them, its own included (the papers' tables; no deployed cache does so).
- ``fp16``: one forward pass without any cache: the reference.
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

#: windows that GPTQ and its heirs draw from C4
C4_WINDOWS = 256


@dataclass(kw_only=True)
class Perplexity(TokenTask):
    """Spans of a text.

    Args:
        name: the data set's name in results.
        text: ``wikitext2``, ``c4`` (256 windows drawn with seed 0, as Atom and KVQuant), ``c4_new`` (the first 1,100
            documents joined, 256 windows), ``pg19`` (books), ``text`` (files of `path`), ``mini_text`` (Python's own).
        path: a local file or folder; None reads from the hub.
        source: the file on the hub.
        mode: ``decode``, ``simulated`` or ``fp16``, see the module.
        window: tokens of a window.
        stride: tokens between the beginnings of windows; below `window` they overlap, and only the last `stride` tokens
            of each but the first are scored; None: side by side.
        limit: windows; None: all.
        per_document: windows of each document; None: all.
        skip: tokens left out at the beginning of each document.
        prefill: tokens of each window that are a prompt, not scored (Cocktail quantizes nothing else).
        chunk: tokens that the model runs over at once in ``decode`` (auto: 128). Attention still takes them one by one
            where a method moves tokens while decoding, so the result does not depend on it.
        bos: the first token of each window is replaced by the beginning-of-sequence token.
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
        """Raise ConfigError for spans that score nothing."""
        self.source.check()
        check_text(self.text, self.path)
        if self.stride is not None and self.stride > self.window:
            raise ConfigError("dataset.stride", self.stride, f"leaves tokens out (dataset.window={self.window})")
        if self.prefill >= self.window:
            raise ConfigError("dataset.prefill", self.prefill, f"leaves nothing to score of {self.window} tokens")
        if self.text == "c4" and self.stride not in (None, self.window):
            raise ConfigError("dataset.stride", self.stride, "c4's windows are drawn one by one: they do not slide")

    def fits(self, config: Setup) -> None:
        """Raise ConfigError for spans longer than the model, and modes that would not measure the method."""
        longest = config.model.max_length
        if self.window > longest:
            raise ConfigError(
                "dataset.window",
                self.window,
                f"is longer than the model takes (model.max_length={longest})",
                allowed=f"8 to {longest}",
                hint=f"dataset.window={longest}",
            )
        config.method.alone().check_windows(self.mode, self.prefill)

    @cached_property
    def documents(self) -> list[str]:
        """The texts, read on first use. Raises DataError if they cannot be read."""
        return DOCUMENTS[self.text](self.source, self.path)

    @cached_property
    def checksum(self) -> str:
        """Checksum of the texts (see :func:`kvbench.tasks.data.fingerprint`)."""
        return data.fingerprint(({"text": text} for text in self.documents), ("text",))

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the files to fetch: a source on the hub, and the name that replaces ``{task}`` in it."""
        return iter(() if self.source.hub_id is None else ((self.source, "test"),))

    def samples(self) -> Iterator[Sample]:
        """Yield the spans, numbered over all documents."""
        windows = self._drawn() if self.text == "c4" else self._cut()
        count = 0
        for count, (document, ids, first, size) in enumerate(windows, start=1):
            yield self._sample(count - 1, document, ids, first, size)
            if count == (self.limit or (C4_WINDOWS if self.text == "c4_new" else None)):
                return
        if not count:
            raise DataError(f"{self.name}: no document has {self.window} tokens.\n  hint: a smaller dataset.window")

    def identity(self) -> dict[str, Any]:
        """Return what determines the spans, except their number and the tokenizer (which belongs to the model)."""
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
        """Return facts about the data that a result records in addition to the identity."""
        return {"mode": self.mode, "characters": sum(map(len, self.documents))}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return nothing: a span has no prediction, its likelihood stands in the row."""
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
                # `>=` in the original, which fails where a document is exactly as long
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
