"""MRCR (openai/mrcr): repeat the n-th of several messages on one topic, out of a long conversation.

Prompts and scores follow the README of openai/mrcr at 204b0d4e; the area under the scores by length is Context Arena's
(:mod:`kvbench.metrics.mrcr`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, DataError
from kvbench.metrics.mrcr import BINS, score_mrcr
from kvbench.metrics.reasoning import without_thinking
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample, Setup, check_list
from kvbench.tasks.long_answers import LongAnswers, check_context
from kvbench.tasks.mini.tokens import encoder, tokenizer_fingerprint
from kvbench.tasks.records import COUNT, FILLED_TEXT, Record, check_record, is_text
from kvbench.tasks.template import Entry
from kvbench.util.schema import MOST_TOKENS, bounded

#: characters of MRCR's conversations for a token of o200k_base, where the tokens are estimated
CHARACTERS = 4.9


@dataclass(frozen=True, kw_only=True)
class MRCR(LongAnswers):
    """MRCR (OpenAI's version): repeat the n-th of several messages on one topic, out of a long conversation.

    The messages go through the model's chat template as they are. Each bin of lengths has its own score. A conversation
    that the model does not hold together with its answer, by the model's own tokenizer, is left out and named.

    Args:
        needles: number of messages on the topic, 2, 4 or 8.
        lengths: upper edges of the bins to run.
        o200k: file with the tokenizer o200k_base (tokenizer.json), by which the authors count the tokens of messages
            and answer. None estimates them from the characters (:data:`CHARACTERS`), so that a conversation near an
            edge may be in the next bin.
    """

    name: str = "mrcr"
    template: str = "{prompt}"
    split: str = "train"
    needles: int = bounded(2, minimum=2, maximum=8)
    lengths: tuple[int, ...] = (8192, 16_384, 32_768, 65_536, 131_072)
    o200k: str | None = None
    max_new_tokens: int = bounded(4096, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError as :meth:`Records.check`, and for other numbers of needles or edges of bins."""
        super().check()
        if self.truncation != "refuse":
            raise ConfigError(
                "dataset.truncation", self.truncation, "would cut conversations, whose messages are numbered"
            )
        if self.needles not in (2, 4, 8):
            raise ConfigError("dataset.needles", self.needles, "is not a part of MRCR", allowed=[2, 4, 8])
        check_list("dataset.lengths", self.lengths, BINS)
        for length in self.lengths:
            if length not in BINS:
                raise ConfigError("dataset.lengths", length, "is not the edge of a bin", allowed=BINS)

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the longest bin does not fit into the model; its edge includes the answer."""
        super().fits(config)
        smaller = [edge for edge in BINS if edge <= config.model.max_length]
        check_context(config, max(self.lengths), 0, "dataset.lengths", str(smaller[-1:]) if smaller else None)

    def read(self) -> dict[str, list[Entry]]:
        """See :meth:`Records.read`; only conversations with `needles` and of the configured lengths are kept."""
        entries = super().read()[self.split]
        chosen = [entry for entry in entries if entry.record["edge"] in self.lengths]
        if not chosen:
            raise DataError(
                f"dataset {self.name}: none of {len(entries)} records has {self.needles} needles and a length in "
                f"dataset.lengths={list(self.lengths)}"
            )
        by_bin = {edge: [entry for entry in chosen if entry.record["edge"] == edge] for edge in sorted(self.lengths)}
        turns = zip_longest(*by_bin.values())  # one of each bin in turn, so that `limit` takes from all of them
        return {self.split: [entry for turn in turns for entry in turn if entry is not None]}

    def _repeated(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        return []  # many conversations end in the same request

    def entry(self, record: Record, place: str) -> Entry:
        """Return the last message of a conversation as the prompt; the record keeps the messages before it."""
        texts = dict.fromkeys(("prompt", "answer", "random_string_to_prepend"), FILLED_TEXT)
        check_record(record, {**texts, "n_needles": COUNT, "n_chars": COUNT}, place)
        try:
            messages = [(turn["role"], turn["content"]) for turn in json.loads(record["prompt"])]
            (*history, (role, request)) = messages
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise DataError(f"{place}: field 'prompt' is not a JSON list of chat messages ({error}).") from error
        if role != "user" or not all(is_text(text) for message in messages for text in message):
            raise DataError(f"{place}: field 'prompt' must be messages with texts, the last one of the user.")
        fields = {name: record[name] for name in texts}
        edge = None
        if record["n_needles"] == self.needles:
            contents = [*(text for _, text in messages), record["answer"]]
            edge = _bin(record["n_chars"] / CHARACTERS if self._counter is None else self._counter(contents))
        return Entry(request, None, request, (record["answer"],), {**fields, "edge": edge, "history": tuple(history)})

    @cached_property
    def _counter(self) -> Callable[[Sequence[str]], int] | None:
        """Function that counts the tokens of texts by the tokenizer in the file `o200k`; None without a file."""
        if self.o200k is None:
            return None
        try:
            encode = encoder(Path(self.o200k))
        except DataError as error:
            raise ConfigError(
                "dataset.o200k",
                self.o200k,
                "is not a tokenizer.json that can be read",
                hint="dataset.o200k=null, which estimates the tokens from the characters",
            ) from error
        return lambda texts: sum(map(len, encode(texts)))

    def finished(self, sample: Sample, entry: Entry, index: int, repeat: int) -> Sample:
        """See :meth:`LongAnswers.finished`."""
        rules = PromptRules(chat=self.chat, system=self.system, history=entry.record["history"])
        meta = {"prefix": entry.record["random_string_to_prepend"]}
        name = f"{self.name}_{self.needles}needle"
        length = entry.record["edge"]
        return replace(sample, task=name, length=length, rules=rules, meta=meta, target=None, truncation="leave_out")

    def identity(self) -> dict[str, Any]:
        """Return the identity of :meth:`LongAnswers.identity`, with a checksum of the conversations."""
        records = [entry.record for entry in self.entries[self.split]]
        counted = {} if self.o200k is None else {"o200k": tokenizer_fingerprint(Path(self.o200k))}
        conversations = data.records_fingerprint(records, ("prompt", "answer"))
        return {**super().identity(), "conversations": conversations, **counted}

    def notes(self) -> dict[str, Any]:
        """Return the notes of :meth:`Records.notes`, and how the lengths of the bins were counted."""
        estimated = f"estimated, {CHARACTERS} characters a token"
        return {**super().notes(), "lengths": estimated if self.o200k is None else f"tokens of {Path(self.o200k).name}"}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return ``score``, the similarity to the right message (:func:`kvbench.metrics.mrcr.score_mrcr`)."""
        return score_mrcr(without_thinking(prediction), sample.answers[0], sample.meta["prefix"])


def _bin(tokens: float) -> int | None:
    """Return the upper edge of the bin of a conversation with this many tokens; None outside all bins."""
    return next((edge for edge in BINS if tokens <= edge), None) if tokens >= BINS[0] / 2 else None
