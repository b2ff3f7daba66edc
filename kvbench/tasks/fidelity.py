"""Fidelity as a task: the distance of a cache's predictions from those of the full-precision cache, token by token.

The tokens are given: windows of a text, or fp16's own greedy answers to the prompts of another data set. The cache to
examine (the candidate) holds an exact prefill of the prompt, and then decodes these tokens one at a time, so that every
prediction after the first reads what the cache really stores. At each position three things are computed: the KL
divergence from fp16's prediction, the change of the true token's probability, and whether both give the same token the
highest probability (:mod:`kvbench.metrics.fidelity`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.base import Sample, Setup, Task, TokenTask
from kvbench.tasks.data import HubSource
from kvbench.tasks.load import load
from kvbench.tasks.perplexity import Perplexity
from kvbench.tasks.texts import DOCUMENTS
from kvbench.tasks.work import CompareTokens, Generate, ScoreText
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST_TOKENS, bounded, unknown

#: the data set that cuts texts into windows
WINDOWS = "kvbench.tasks.perplexity.Perplexity"
#: a text that needs no download and no path
BUNDLED_TEXT = "mini_text"


@dataclass(kw_only=True)
class Fidelity(TokenTask):
    """Data set that compares a cache's predictions with those of the full-precision cache.

    Args:
        text: the text to decode: ``mini_text`` (texts that come with Python), or a file or folder of your own. Ignored
            if `over` is set.
        over: name of another data set, for example ``mini/key_value_hex`` or ``perplexity/wikitext2``; its prompts, or
            its texts, are used instead of `text`.
        options: options of the data set in `over`, for example ``{lengths: [1024]}``.
        answers: the tokens that are decoded after the prompts of `over`: ``fp16``, the full-precision cache's own
            greedy answers, or ``task``, the reference answers.
        window: number of tokens per window of a text.
        prefill: number of tokens at the beginning of each window that are prefilled exactly, and not scored.
        limit: largest number of windows; with `over`, the value for that data set's option ``limit``. None for all
            windows, or for the option's default.
        per_document: largest number of windows of each document; None for all.
        skip: number of tokens to skip at the beginning of each document.
        bos: True to replace the first token of each window by the beginning-of-sequence token.
        mode: ``decode``, or ``simulated`` for one pass over quantized keys and values, as llama.cpp measures it.
        statistics: ``exact``, or ``llamacpp`` to imitate the rounding of llama.cpp's ``--kl-divergence``.
        reference: ``stored`` to keep fp16's predictions in ``runtime.results_dir`` for later runs, or ``live`` to make
            them again in every batch.
        probe: number of samples for which the error of each layer's attention is measured, in additional passes.
    """

    version = 1
    scorer_version = 1

    name: str = "fidelity"
    text: str = BUNDLED_TEXT
    over: str | None = None
    options: dict[str, Any] | None = None
    answers: Literal["fp16", "task"] = "fp16"
    window: int = bounded(768, minimum=8, maximum=MOST_TOKENS)
    prefill: int = bounded(512, minimum=1, maximum=MOST_TOKENS)
    limit: int | None = bounded(16, minimum=1)
    per_document: int | None = bounded(2, minimum=1)
    skip: int = bounded(0, minimum=0)
    bos: bool = True
    mode: Literal["decode", "simulated"] = "decode"
    statistics: Literal["exact", "llamacpp"] = "exact"
    reference: Literal["stored", "live"] = "stored"
    probe: int = bounded(0, minimum=0)

    def check(self) -> None:
        """Raise ConfigError if `over` is not a data set with texts or answers, or an option contradicts another."""
        if not isinstance(self.inner, Perplexity):
            if self.inner.times_only or self.inner.adaptive or isinstance(self.inner, Fidelity):
                raise ConfigError("dataset.over", self.over, "has neither texts nor prompts with answers")
            if self.mode != "decode":
                raise ConfigError(
                    "dataset.mode", self.mode, "is for windows of a text; answers can only be decoded", allowed="decode"
                )
        if self.probe and self.mode != "decode":
            raise ConfigError("dataset.probe", self.probe, "needs dataset.mode=decode", hint="dataset.probe=0")

    def fits(self, config: Setup) -> None:
        """Raise ConfigError for sampling, for tensor parallelism, or if the data set in `over` does not fit."""
        if config.decoding.temperature:
            raise ConfigError(
                "decoding.temperature",
                config.decoding.temperature,
                "draws tokens at random, whereas dataset=fidelity compares greedy decoding",
                hint="decoding.temperature=0",
            )
        if config.runtime.tensor_parallel is not None:
            raise ConfigError(
                "runtime.tensor_parallel",
                config.runtime.tensor_parallel,
                "divides the model's head among processes, which dataset=fidelity does not support",
                hint="runtime.device_map=auto spreads whole layers over GPUs",
            )
        self.inner.fits(config)

    @cached_property
    def inner(self) -> Task:
        """The data set whose texts or prompts are used: that in `over`, or windows of `text`.

        Raises:
            ConfigError: `over` is not the name of a data set, or one of its options is invalid.
        """
        spans = {
            "window": self.window,
            "prefill": self.prefill,
            "per_document": self.per_document,
            "skip": self.skip,
            "bos": self.bos,
            "mode": self.mode,
            "limit": self.limit,
        }
        if self.over is None:
            if self.text in DOCUMENTS and self.text != BUNDLED_TEXT:
                raise ConfigError(
                    "dataset.text",
                    self.text,
                    "is a data set of its own",
                    hint=f"dataset.over=perplexity/{self.text}, or dataset.text=FILE",
                )
            text = {"text": self.text} if self.text == BUNDLED_TEXT else {"text": "text", "path": self.text}
            return load({"_target_": WINDOWS, "name": self.name, **text, **spans})
        names = group_options("dataset")
        if self.over not in names:
            raise unknown("dataset.over", self.over, "no such data set", names)
        content = read_choice(names[self.over])
        if "defaults" in content or content.get("_target_") == f"{__name__}.Fidelity":
            raise ConfigError("dataset.over", self.over, "has neither texts nor prompts with answers")
        if content.get("_target_") == WINDOWS:
            return load({**content, **spans, **(self.options or {})})
        limit = {} if self.limit is None or "limit" not in content else {"limit": self.limit}
        return load({**content, **limit, **(self.options or {})})

    def bind(self, tokenizer: Any) -> None:
        """Set the model's tokenizer, also of the data set whose texts or prompts are used."""
        super().bind(tokenizer)
        self.inner.bind(tokenizer)

    def packages(self) -> tuple[Package, ...]:
        """Return the optional Python packages that the data set in `over` needs."""
        return self.inner.packages()

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the hub files of the data set in `over`."""
        return self.inner.files()

    def samples(self) -> Iterator[Sample]:
        """Yield the windows or the prompts, in the order of the data set that they come from.

        Raises:
            DataError: a sample has several questions on one text, or no answer.
        """
        number = 0
        for sample in self.inner.samples():
            if sample.warm_up:
                continue
            work = CompareTokens(
                mode=self.mode,
                answers=self.answers,
                statistics=self.statistics,
                reference=self.reference,
                probe=number < self.probe,
            )
            if isinstance(sample.work, ScoreText):
                work = replace(work, ids=sample.work.ids, prefill=sample.work.prefill)
            elif not isinstance(sample.work, Generate):
                raise DataError(
                    f"{self.name}: sample {sample.id} of {self.over} is not a prompt with one answer.\n"
                    "  hint: leave its task out, for example with dataset.options={tasks: [...]}"
                )
            elif self.answers == "task" and not sample.answer_ids and not sample.continuation:
                raise DataError(
                    f"{self.name}: sample {sample.id} of {self.over} has no reference answer.\n"
                    "  hint: dataset.answers=fp16"
                )
            number += 1
            yield replace(sample, work=work)

    def identity(self) -> dict[str, Any]:
        """Return the JSON data that is hashed into the run's id: the texts or prompts, and how they are compared."""
        return {
            **self.reference_identity(),
            "statistics": self.statistics,
            "reference": self.reference,
            "probe": self.probe,
        }

    def reference_identity(self) -> dict[str, Any]:
        """Return the part of the identity on which fp16's own predictions depend."""
        return {
            "target": "fidelity",
            "version": self.version,
            "over": self.inner.identity(),
            "over_version": self.inner.version,
            "mode": self.mode,
            "answers": None if isinstance(self.inner, Perplexity) else self.answers,
        }

    def notes(self) -> dict[str, Any]:
        """Return the facts about the data that the data set in `over` stores with results."""
        return self.inner.notes()

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return no scores: the result of a sample is the comparison, and no answer is generated freely."""
        return {}
