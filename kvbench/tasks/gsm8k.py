"""GSM8K (Cobbe et al. 2021) with few-shot prompts, as lm-evaluation-harness runs it or as LogQuant's script does.

Source: lm-evaluation-harness, tasks/gsm8k/gsm8k.yaml (version 3.0), and LogQuant's
submission/test_acc/GSM8K/GSM8K_KV_quant_test.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.metrics import gsm8k as metric
from kvbench.metrics.answers import Metric
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample
from kvbench.tasks.data import Record
from kvbench.tasks.from_records import Records
from kvbench.tasks.records import FILLED_TEXT, check_record
from kvbench.tasks.template import Entry
from kvbench.util.schema import MOST_TOKENS, bounded

FIELDS = {"question": FILLED_TEXT, "answer": FILLED_TEXT}

#: strings at which the harness ends an answer
STOP = ("Question:", "</s>", "<|im_end|>")

#: 0-based numbers of the train records that LogQuant's script shows as examples
LOGQUANT_SHOTS = (0, 1, 4, 14, 94)

#: answers that LogQuant's script words differently from the data, by the record's number
LOGQUANT_REWORDED = {
    1: "Weng earns $12/60 minutes = $<<12/60=0.2>>0.2 per minute. "
    "Weng earned $0.2*50 minutes = $<<0.2*50=10>>10. #### 10"
}


@dataclass(frozen=True, kw_only=True)
class GSM8K(Records):
    """The data set GSM8K: the 1,319 questions of its test split, asked with few-shot examples from its train split.

    Args:
        style: ``harness`` builds prompts and scores answers as lm-evaluation-harness does. ``logquant`` does so as
            LogQuant's script does: the prompt has a system turn and five fixed examples inside the user's turn, and
            generation has no stop strings. ``score`` then compares the digits that :func:`kvbench.metrics.gsm8k.digits`
            extracts, and the harness's two scores, ``strict`` and ``flexible``, are recorded as well.
        template, answer, metric, shots, order, stop: as in :class:`Records`, but with lm-evaluation-harness's values as
            defaults. One random generator draws the examples for question 0, then for question 1, and so on, so a
            question keeps its examples whatever ``dataset.limit`` is.
        max_new_tokens: maximum number of tokens to generate; None for 256 (the harness's default), or for 1024 with
            ``style=logquant``.
        prompt_tokens: shortest and longest prompt to keep, in tokens, for example ``[600, 1700]`` (LogQuant, sec. 4.1:
            "the length of the input token"). Questions whose prompts are outside this range are left out. The count
            includes the few-shot examples and the tokenizer's special tokens, but not the system turn or the chat
            formatting. None keeps all questions, as LogQuant's script does.
    """

    name: str = "gsm8k"
    style: Literal["harness", "logquant"] = "harness"
    template: str = "Question: {question}\nAnswer:"
    metric: Metric = "gsm8k"
    shots: int = bounded(5, minimum=0, maximum=64)
    order: Literal["first", "sampled"] = "sampled"
    max_new_tokens: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)  # type: ignore[assignment]
    stop: tuple[str, ...] = STOP
    prompt_tokens: tuple[int, int] | None = None

    _tokenizer: ClassVar[Any] = None

    @property
    def needs_tokenizer(self) -> bool:  # type: ignore[override]
        """True if `prompt_tokens` is set: prompts must then be tokenized to choose the questions by length."""
        return self.prompt_tokens is not None

    def bind(self, tokenizer: Any) -> None:
        """Set the model's tokenizer, with which prompts are measured if `prompt_tokens` is set."""
        object.__setattr__(self, "_tokenizer", tokenizer)

    def check(self) -> None:
        """Raise ConfigError if an option is invalid, or would change the few-shot examples of ``style=logquant``.

        This style prescribes its five examples, so `shots`, `shots_seed` and `order` must keep their defaults.
        """
        super().check()
        if self.style == "logquant" and (self.shots, self.shots_seed, self.order) != (5, 1234, "sampled"):
            raise ConfigError(
                "dataset.shots", self.shots, "must be 5, because dataset.style=logquant has five fixed examples"
            )
        if self.prompt_tokens is not None and not 0 < self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ConfigError(
                "dataset.prompt_tokens",
                list(self.prompt_tokens),
                "must be the smallest and the largest number of tokens of a prompt",
                hint="dataset.prompt_tokens=[600,1700]",
            )

    @property
    def _splits(self) -> tuple[str, ...]:
        return (self.examples, self.split)

    @cached_property
    def entries(self) -> dict[str, list[Entry]]:
        """The questions to ask and the pool of few-shot examples, as entries by split; read on first use.

        Raises:
            DataError: `path` is a single file, a split cannot be read, or the train split has too few records for the
                examples.
        """
        if self.path is not None and data.is_single(self.path):
            raise DataError(
                f"dataset {self.name}: dataset.path={self.path} is a single file.\n"
                "  hint: name a folder with train and test files"
            )
        splits = self.read()
        if self.style == "logquant" and len(splits[self.examples]) <= max(LOGQUANT_SHOTS):
            raise DataError(
                f"dataset {self.name}: '{self.examples}' has only {len(splits[self.examples])} records, but"
                f" dataset.style=logquant shows the records {', '.join(map(str, LOGQUANT_SHOTS))}, counted from 0.\n"
                "  hint: set dataset.style=harness"
            )
        return splits

    def entry(self, record: Record, place: str) -> Entry:
        """See :meth:`Records.entry`.

        Raises:
            DataError: the question or the answer is missing, empty or not a string, or the answer has no final number.
        """
        check_record(record, FIELDS, place)
        return super().entry(record, place)

    def samples(self) -> Iterator[Sample]:
        """Yield the first `limit` questions as samples, with their few-shot examples.

        With `prompt_tokens`, questions whose prompts are too short or too long are dropped from these, so there may be
        fewer than `limit` samples.

        Raises:
            KvbenchError: `prompt_tokens` is set, and :meth:`bind` has not been called.
        """
        logquant = self.style == "logquant"
        train = [entry.record for entry in self.entries[self.examples]] if logquant else []
        for sample in super().samples():
            sample = replace(sample, id=f"gsm8k/{sample.id.rpartition('/')[2]}", task="gsm8k")
            if logquant:
                record = self.entries[self.split][int(sample.id.rpartition("/")[2])].record
                sample = replace(
                    sample,
                    prompt=logquant_prompt(train, record["question"]),
                    target=record["answer"],
                    stop=(),
                    rules=PromptRules(system="You are a helpful assistant."),
                )
            if self._keeps(sample.prompt):
                yield replace(sample, max_new_tokens=self.max_new_tokens or (1024 if logquant else 256))

    def _keeps(self, prompt: str) -> bool:
        """Return True if the number of tokens of `prompt` is within `prompt_tokens`."""
        if self.prompt_tokens is None:
            return True
        if self._tokenizer is None:
            raise KvbenchError(
                "GSM8K: dataset.prompt_tokens chooses questions by their number of tokens, so the task needs the "
                "model's tokenizer.\n  hint: call task.bind(tokenizer) before task.samples()"
            )
        smallest, largest = self.prompt_tokens
        return smallest <= len(self._tokenizer(prompt, verbose=False)["input_ids"]) <= largest

    def identity(self) -> dict[str, Any]:
        """Return checksums of both splits, and the prompt's options."""
        return {
            "target": "gsm8k",
            "version": self.version,
            "style": self.style,
            "sha256": {
                split: data.records_fingerprint((entry.record for entry in entries), tuple(FIELDS))
                for split, entries in self.entries.items()
            },
            "shots": self.shots,
            "shots_seed": self.shots_seed,
            "order": self.order,
            "max_new_tokens": self.max_new_tokens,
            **({} if self.prompt_tokens is None else {"prompt_tokens": list(self.prompt_tokens)}),
        }

    def notes(self) -> dict[str, Any]:
        """Return facts to store with the results: the number of records per split, and the harness's stop strings."""
        return {"records": {split: len(entries) for split, entries in self.entries.items()}, "stop": list(STOP)}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score a generated answer by the number that it ends with.

        Returns:
            ``strict``, ``flexible`` and ``score``, each 1 if right and 0 if wrong; with ``style=logquant`` also
            ``digits``. ``score`` equals ``digits`` with ``style=logquant``, and ``strict`` otherwise.
        """
        scores = super().score(sample, prediction)
        if self.style == "logquant":
            scores["score"] = scores["digits"] = metric.score_digits(prediction, sample.answers[0])
        return scores


def logquant_prompt(train: Sequence[Record], question: str) -> str:
    """Return the user message of LogQuant's script: an instruction, five fixed examples and the question.

    The script's prompt is a multi-line string in indented code, so all lines but the first and the last begin with
    eight spaces, here too. The examples are those of the train split at the indices :data:`LOGQUANT_SHOTS`.
    """
    indent = " " * 8
    lines = ["Please answer the following question by the format, mark the final answer by ####."]
    for number, row in enumerate(LOGQUANT_SHOTS, start=1):
        answer = LOGQUANT_REWORDED.get(row, train[row]["answer"].replace("\n", " "))
        shown = " ".join(train[row]["question"].split())
        lines += [f"{indent}example {number}: ", f"{indent}question: {shown}"]
        lines += [f"{indent}answer: {answer}"]
    lines += [f"{indent}Question for you: ", f"{indent}question: {question}", ""]
    return "\n".join(lines)
