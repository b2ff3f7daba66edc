"""Samples that the model holds together with their reference answers; others are left out of a run by name.

It concerns samples with ``truncation="leave_out"``: a conversation whose messages are numbered must not be cut, and a
prompt that leaves no room for its answer tests nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvbench.errors import DataError
from kvbench.tasks.base import Sample
from kvbench.util.progress import say

if TYPE_CHECKING:
    from kvbench.config.run_config import RunConfig

#: number of names of samples in a message
SHOWN = 8


@dataclass
class Fitting:
    """The choice of a run's samples that fit; each sample is tokenized once.

    Attributes:
        too_long: names of the samples that do not fit, by the key of their score.
    """

    config: RunConfig
    too_long: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fitted: dict[str, Sample | None] = {}

    def chosen(self, samples: Sequence[Sample], done: Collection[str]) -> list[Sample]:
        """Return the samples that fit, with `max_new_tokens` reduced to what the model leaves for the answer.

        Those that do not fit are added to :attr:`too_long`, and reported once.

        Args:
            done: names of samples that have rows: they fit, and are returned unchanged.

        Raises:
            DataError: not a single sample fits.
        """
        kept, left_out = [], []
        for sample in samples:
            if sample.truncation != "leave_out" or sample.id in done:
                kept.append(sample)
                continue
            new = sample.id not in self._fitted
            fitted = self.fitted(sample)
            if fitted is not None:
                kept.append(fitted)
            elif new:
                left_out.append(sample)
                self.too_long.setdefault(sample.score_key, []).append(sample.id)
        if left_out:
            names = ", ".join(sample.id for sample in left_out[:SHOWN])
            more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
            model = self.config.model
            limits = {"model.max_length": model.max_length, "model.prompt_limit": model.prompt_limit}
            by = ", ".join(f"{key}={limit}" for key, limit in limits.items() if limit is not None)
            say(
                f"{len(left_out)} of {len(samples)} samples do not fit into the model with their answers "
                f"({by}), and are left out: {names}{more}"
            )
        if samples and not kept:
            raise DataError(
                f"none of {len(samples)} samples fits into the model with its answer.\n"
                "  hint: choose a model with a longer context, or shorter ones in dataset.lengths"
            )
        return kept

    def fitted(self, sample: Sample) -> Sample | None:
        """Return a sample with `max_new_tokens` reduced to what its prompt leaves; None if the answer does not fit."""
        if sample.truncation != "leave_out":
            return sample
        if sample.id not in self._fitted:
            self._fitted[sample.id] = self._fit(sample)
        return self._fitted[sample.id]

    def _fit(self, sample: Sample) -> Sample | None:
        from kvbench.runner.prompting import answer_ids, encode_prompt, own_limit, prompt_limit

        model, fixed = self.config.model, self.config.decoding.max_new_tokens
        tokens = len(encode_prompt(sample, self._tokenizer, chat=model.chat).ids)
        configured = own_limit(sample, model)
        if configured is not None and tokens > configured:
            return None
        room = prompt_limit(None, model.max_length, tokens)  # for the answer
        if room is None:
            return sample
        wanted = fixed or len(answer_ids(sample, self._tokenizer)) + 1  # and the token that ends it
        return None if room < wanted else replace(sample, max_new_tokens=min(sample.max_new_tokens, room))

    @cached_property
    def _tokenizer(self) -> Any:
        from kvbench.models.load import load_tokenizer

        return load_tokenizer(self.config.model)
