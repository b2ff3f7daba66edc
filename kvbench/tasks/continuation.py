"""Continuation of long texts: prompts with a fixed number of the model's tokens, cut from books or other files.

Source: the speed runs of QuantSpec (Tiwari et al. 2025, sec. 5.1 and appendix F) and of MagicDec. As in MagicDec's
``convert_pg19_dataset``, the first 8,000 tokens of a book are skipped, the rest is cut into prompts of the same length,
and the first token of each is replaced by the beginning-of-sequence token. 90 tokens are generated. The reference
answer is the continuation in the text itself, whose likelihood is recorded. Generated text is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError, LengthError
from kvbench.tasks.base import PromptRules, Sample, Setup
from kvbench.tasks.data import HubSource
from kvbench.tasks.texts import TextTask, check_text
from kvbench.util.schema import MOST_TOKENS, bounded

#: minimum number of prompt tokens
SHORTEST = 16
#: maximum number of warm-up prompts
MOST_WARM_UP = 10_000


@dataclass(kw_only=True)
class Continuation(TextTask):
    """Prompts of fixed lengths cut from long texts, for which the model generates a continuation.

    Args:
        text: the texts: ``pg19`` (books), ``text`` (files of `path`) or ``mini_text`` (texts that come with Python).
        path: a local file or folder; None reads from the hub.
        lengths: prompt lengths in tokens, including the beginning-of-sequence token.
        limit: maximum number of measured prompts per length; None for all that the texts provide.
        warm_up: number of warm-up prompts per length. They run before the measured prompts; only their peak memory
            appears in the results.
        per_document: maximum number of prompts cut from one document; None to cut each document into consecutive
            prompts up to its end, as the authors' code does.
        skip: number of tokens skipped at the beginning of each document.
        max_new_tokens: number of tokens to generate.
        bos: True to replace the first token of each prompt by the beginning-of-sequence token.
    """

    version = 1
    scorer_version = 1

    name: str = "pg19"
    text: Literal["pg19", "text", "mini_text"] = "pg19"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    lengths: tuple[int, ...] = bounded((4096,), minimum=SHORTEST, maximum=MOST_TOKENS)
    limit: int | None = bounded(10, minimum=1)
    warm_up: int = bounded(3, minimum=0, maximum=MOST_WARM_UP)
    per_document: int | None = bounded(1, minimum=1)
    skip: int = bounded(8000, minimum=0, maximum=MOST_TOKENS)
    max_new_tokens: int = bounded(90, minimum=1, maximum=MOST_TOKENS)
    bos: bool = True
    _encoded: dict[int, tuple[list[int], list[tuple[int, int]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self) -> None:
        """Raise ConfigError if prompt lengths or the source are invalid, or if ``text=text`` is set without a path."""
        self.source.check()
        check_lengths(self.lengths)
        check_text(self.text, self.path)

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the longest prompt and its answer exceed what the model accepts."""
        check_fits(config, self.lengths, self.max_new_tokens)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of each length, the warm-up prompts first.

        Raises:
            LengthError: every text is too short for a length.
            DataError: no prompt is left after the warm-up prompts.
        """
        for length in self.lengths:
            count = 0
            for count, sample in enumerate(self._pieces(length), start=1):
                yield warmed(sample, count <= self.warm_up)
                if self.limit is not None and count == self.warm_up + self.limit:
                    break
            if not count:
                raise self._too_short(length)
            check_warm_up(self.name, count, length, self.warm_up, "dataset.per_document=null")

    def identity(self) -> dict[str, Any]:
        """Return JSON data that identifies the prompts' content. Their number and the tokenizer are not part of it."""
        settings = ("text", "warm_up", "per_document", "skip", "max_new_tokens", "bos")
        return {
            "target": "continuation",
            "version": self.version,
            "sha256": self.checksum,
            "lengths": list(self.lengths),
            **{key: getattr(self, key) for key in settings},
        }

    def notes(self) -> dict[str, Any]:
        """Return the number of documents and the number of warm-up prompts per length, for `metrics.json`."""
        return {"documents": len(self.documents), "warm_up": self.warm_up}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return no scores. The result of this data set is the likelihood of the text's own continuation."""
        return {}

    def _pieces(self, length: int) -> Iterator[Sample]:
        for number in range(len(self.documents)):
            text, (ids, offsets) = self.documents[number], self._tokens(number)
            starts = range(self.skip, len(ids) - length - self.max_new_tokens + 1, length)
            for piece, start in enumerate(starts[: self.per_document]):
                stop = start + length
                prompt = ids[start:stop]
                if self.bos and self.tokenizer.bos_token_id is not None:
                    prompt[0] = self.tokenizer.bos_token_id
                following = ids[stop : stop + self.max_new_tokens]
                end = offsets[stop + self.max_new_tokens - 1][1]
                yield Sample(
                    id=f"{self.text}@{length}/{number}.{piece}",
                    task=self.text,
                    length=length,
                    prompt=text[offsets[start][0] : offsets[stop - 1][1]],
                    answers=(text[offsets[stop - 1][1] : end],),
                    max_new_tokens=self.max_new_tokens,
                    truncation="refuse",
                    rules=PromptRules(ids=tuple(prompt)),
                    answer_ids=tuple(following),
                )

    def _too_short(self, length: int) -> LengthError:
        """Return the error for a prompt length for which every document is too short."""
        longest = max((len(self._tokens(number)[0]) for number in range(len(self.documents))), default=0)
        room = longest - self.skip - self.max_new_tokens
        hint = f"set dataset.lengths to at most [{room}]" if room >= SHORTEST else "provide longer texts"
        if self.skip and room + self.skip >= SHORTEST:
            hint += ", or reduce dataset.skip"
        return LengthError(
            f"{self.name}: none of {len(self.documents)} documents is long enough for a prompt of {length} tokens. "
            f"The longest has {longest} tokens; {self.skip + length + self.max_new_tokens} are needed for "
            f"dataset.skip={self.skip}, the prompt and dataset.max_new_tokens={self.max_new_tokens}.\n  hint: {hint}"
        )

    def _tokens(self, number: int) -> tuple[list[int], list[tuple[int, int]]]:
        if number not in self._encoded:
            encoded = self.tokenizer(self.documents[number], return_offsets_mapping=True, verbose=False)
            self._encoded[number] = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        ids, offsets = self._encoded[number]
        return list(ids), offsets


def check_fits(config: Setup, lengths: tuple[int, ...], max_new_tokens: int) -> None:
    """Raise ConfigError if the longest prompt and its answer exceed what the model accepts.

    Prompts of a fixed length are never truncated, so all of them must fit. ``decoding.max_new_tokens`` overrides
    `max_new_tokens`.
    """
    model, new = config.model, config.decoding.max_new_tokens or max_new_tokens
    most = min(model.max_length - new, model.prompt_limit or model.max_length)
    if max(lengths) > most:
        limit = f" and model.prompt_limit={model.prompt_limit}" if model.prompt_limit else ""
        raise ConfigError(
            "dataset.lengths",
            list(lengths),
            f"do not fit the model together with {new} new tokens (model.max_length={model.max_length}{limit})",
            allowed=f"{SHORTEST} to {most}"
            if most >= SHORTEST
            else "no length; reduce decoding.max_new_tokens or choose another model",
            hint=f"dataset.lengths=[{most}]" if most >= SHORTEST else "",
        )


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Raise ConfigError if no prompt length is given, one is below :data:`SHORTEST` tokens, or one is repeated."""
    if not lengths or min(lengths) < SHORTEST or len(set(lengths)) < len(lengths):
        raise ConfigError(
            "dataset.lengths",
            list(lengths),
            f"must be a list of different prompt lengths of at least {SHORTEST} tokens",
            allowed="[4096,8192]",
        )


def check_warm_up(name: str, count: int, length: int, warm_up: int, more: str = "") -> None:
    """Raise DataError if all prompts of one length are used for warm-up, so that none is left to measure.

    `count` is the number of prompts that the data provides at this length. `more` is a command-line override with which
    it would provide more, for the hint; empty if there is none.
    """
    if count <= warm_up:
        raise DataError(
            f"{name}: the data provide only {count} prompt{'s' if count > 1 else ''} of {length} tokens, and the first "
            f"{warm_up} are used for warm-up, so none is left to measure.\n"
            f"  hint: set dataset.warm_up to at most {count - 1}, or reduce "
            f"dataset.lengths{more and f', or set {more}'}"
        )


def warmed(sample: Sample, warm_up: bool) -> Sample:
    """Return `sample` itself, or a copy of it marked as a warm-up sample if `warm_up` is True."""
    return replace(sample, warm_up=True) if warm_up else sample
