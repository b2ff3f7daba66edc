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
from kvbench.tasks.entries import Entry
from kvbench.tasks.from_records import Records
from kvbench.tasks.records import FILLED_TEXT, check_record
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
    """The data set GSM8K, which asks the 1,319 questions of its test split with few-shot examples.

    Args:
        style: ``harness`` reproduces lm-evaluation-harness. ``logquant`` reproduces LogQuant's script: a system turn,
            five fixed examples in the user's turn and no stop strings. The main score then compares what
            :func:`kvbench.metrics.gsm8k.digits` extracts, and the harness's two scores (strict and flexible) are
            recorded next to it.
        template, answer, metric, shots, order, stop: as in :class:`Records`, with the harness's values as defaults. The
            examples of all questions are drawn from one random generator in the order of the questions, so a question
            has the same examples however many questions are asked (``dataset.limit``).
        max_new_tokens: number of tokens to generate; None for 256 (the harness's default), or 1024 with ``logquant``.
        prompt_tokens: smallest and largest number of tokens of a prompt, for example ``[600, 1700]`` (LogQuant, sec.
            4.1: "the length of the input token"). Questions with shorter or longer prompts are left out. The count
            includes the examples and the tokenizer's special tokens, but no system turn and no chat wrapper. None
            keeps all questions, as LogQuant's script does.
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
        """True if `prompt_tokens` is set, so that questions are chosen by the length of their prompts."""
        return self.prompt_tokens is not None

    def bind(self, tokenizer: Any) -> None:
        """Receive the model's tokenizer."""
        object.__setattr__(self, "_tokenizer", tokenizer)

    def check(self) -> None:
        """Raise ConfigError for an invalid option, or for one that would have no effect with ``style=logquant``."""
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
        """Records of the test and train splits as prompts without few-shot examples, by split; read on first use.

        Raises:
            DataError: a split cannot be read, or has too few records for the examples.
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
        """Return one record as a prompt, without few-shot examples.

        Args:
            record: the record as read from the file.
            place: file and line of the record, for messages.

        Raises:
            DataError: a field is missing or empty.
        """
        check_record(record, FIELDS, place)
        return super().entry(record, place)

    def samples(self) -> Iterator[Sample]:
        """Yield the first `limit` questions with their examples.

        If `prompt_tokens` is set, questions with shorter or longer prompts are left out and not replaced by others.

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
        """Return JSON data that identifies the samples, without their number."""
        return {
            "target": "gsm8k",
            "version": self.version,
            "style": self.style,
            "sha256": {
                split: data.fingerprint((entry.record for entry in entries), tuple(FIELDS))
                for split, entries in self.entries.items()
            },
            "shots": self.shots,
            "shots_seed": self.shots_seed,
            "order": self.order,
            "max_new_tokens": self.max_new_tokens,
            **({} if self.prompt_tokens is None else {"prompt_tokens": list(self.prompt_tokens)}),
        }

    def notes(self) -> dict[str, Any]:
        """Return the number of records of each split and the stop strings, which are recorded with the results."""
        return {"records": {split: len(entries) for split, entries in self.entries.items()}, "stop": list(STOP)}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return the scores ``strict``, ``flexible`` and ``score``; with ``style=logquant`` also ``digits``.

        ``score`` equals ``digits`` with ``style=logquant``, and ``strict`` otherwise.
        """
        scores = super().score(sample, prediction)
        if self.style == "logquant":
            scores["score"] = scores["digits"] = metric.score_digits(prediction, sample.answers[0])
        return scores


def logquant_prompt(train: Sequence[Record], question: str) -> str:
    """Return the user's turn that LogQuant's script sends, with five fixed examples.

    Most lines begin with spaces, because the script's text includes the indentation of its source code.

    Args:
        train: records of the train split, from which the examples are taken.
        question: the question to answer.
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
