"""GSM8K (Cobbe et al. 2021), few-shot as lm-evaluation-harness runs it, or as LogQuant's script does.

Source: lm-evaluation-harness, tasks/gsm8k/gsm8k.yaml (version 3.0), and LogQuant's
submission/test_acc/GSM8K/GSM8K_KV_quant_test.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.metrics import gsm8k as metric
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample, Task, check_shots
from kvbench.tasks.data import HubSource, Record
from kvbench.tasks.records import FILLED_TEXT
from kvbench.util.schema import MOST, MOST_TOKENS, bounded

FIELDS = {"question": FILLED_TEXT, "answer": FILLED_TEXT}

#: what ends an answer in the harness
STOP = ("Question:", "</s>", "<|im_end|>")

#: train rows that LogQuant's script shows, on one line each
LOGQUANT_SHOTS = (0, 1, 4, 14, 94)

#: its second example's steps are not those of the data
LOGQUANT_REWORDED = {
    1: "Weng earns $12/60 minutes = $<<12/60=0.2>>0.2 per minute. "
    "Weng earned $0.2*50 minutes = $<<0.2*50=10>>10. #### 10"
}


@dataclass(frozen=True, kw_only=True)
class GSM8K(Task):
    """The test split's 1,319 questions.

    Args:
        name: of the data set, for the results.
        style: ``harness`` (lm-evaluation-harness: scores strict and flexible) or ``logquant`` (its five fixed examples
            in one turn after a system turn, 1024 tokens, no stop strings; scored by digits alone, see
            :func:`kvbench.metrics.gsm8k.digits`; strict and flexible beside it).
        path: a folder with ``train`` and ``test`` files (.jsonl, .jsonl.gz, .json, .parquet); None: the hub.
        source: the hub's files.
        limit: questions, from the first; None: all.
        shots: examples before the question (``harness``).
        shots_seed: of the examples' draw: one generator over all questions in order, so question k's examples do not
            depend on the limit.
        order: ``sampled`` (the harness's default: drawn anew for each question) or ``first`` (the first train rows).
        max_new_tokens: None: 256 (the harness's default), 1024 for ``logquant``.
    """

    version = 1
    scorer_version = 1

    name: str = "gsm8k"
    style: Literal["harness", "logquant"] = "harness"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    limit: int | None = bounded(None, minimum=1)
    shots: int = bounded(5, minimum=0, maximum=64)
    shots_seed: int = bounded(1234, minimum=0, maximum=MOST)
    order: Literal["sampled", "first"] = "sampled"
    max_new_tokens: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError for settings that could have no effect."""
        self.source.check()
        if self.style == "logquant" and (self.shots, self.shots_seed, self.order) != (5, 1234, "sampled"):
            raise ConfigError("dataset.shots", self.shots, "dataset.style=logquant has five fixed examples")

    @cached_property
    def splits(self) -> dict[str, list[Record]]:
        """``train`` and ``test``. Raises DataError where they cannot be had."""
        what = f"dataset {self.name}"
        if self.path is not None and data.is_single(self.path):
            raise DataError(
                f"{what}: dataset.path={self.path} is one file.\n  hint: a folder with train and test files"
            )
        found = {split: data.find(self.source, split, self.path, what) for split in ("train", "test")}
        records = {split: data.read_records(place, FIELDS, without_number) for split, place in found.items()}
        if self.style == "logquant":
            if len(records["train"]) <= max(LOGQUANT_SHOTS):
                raise DataError(
                    f"{found['train']} has {len(records['train'])} records, and dataset.style=logquant shows those "
                    f"numbered {', '.join(map(str, LOGQUANT_SHOTS))} from 0.\n  hint: dataset.style=harness"
                )
        else:
            check_shots(self.shots, records["train"], found["train"])
        return records

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """What has to be fetched."""
        return ((self.source, split) for split in ("train", "test"))

    def samples(self) -> Iterator[Sample]:
        """The first `limit` questions."""
        train, test = self.splits["train"], self.splits["test"]
        draw = random.Random(self.shots_seed)
        for index, record in enumerate(test[: self.limit]):
            if self.style == "logquant":
                prompt = logquant_prompt(train, record["question"])
            elif self.order == "first":
                prompt = harness_prompt(train[: self.shots], record["question"])
            else:
                prompt = harness_prompt(draw.sample(train, self.shots), record["question"])
            yield self._sample(index, prompt, record)

    def _sample(self, index: int, prompt: str, record: Record) -> Sample:
        own = self.style == "logquant"
        return Sample(
            id=f"gsm8k/{index}",
            task="gsm8k",
            prompt=prompt,
            answers=(record["answer"],),
            max_new_tokens=self.max_new_tokens or (1024 if own else 256),
            stop=() if own else STOP,
            target=record["answer"] if own else f" {record['answer']}",
            rules=PromptRules(system="You are a helpful assistant." if own else None),
        )

    def identity(self) -> dict[str, Any]:
        """What determines the samples but for how many there are."""
        return {
            "target": "gsm8k",
            "version": self.version,
            "style": self.style,
            "sha256": {split: data.fingerprint(records, tuple(FIELDS)) for split, records in self.splits.items()},
            "shots": self.shots,
            "shots_seed": self.shots_seed,
            "order": self.order,
            "max_new_tokens": self.max_new_tokens,
        }

    def notes(self) -> dict[str, Any]:
        """What a result says about the data beside the identity."""
        return {"records": {split: len(records) for split, records in self.splits.items()}, "stop": list(STOP)}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """``score`` (strict, or digits for ``logquant``), ``strict``, ``flexible``."""
        scores = metric.score(prediction, sample.answers[0])
        if self.style == "logquant":
            scores["score"] = scores["digits"] = metric.score_digits(prediction, sample.answers[0])
        return scores


def without_number(record: Record) -> str | None:
    """What is wrong with a record whose answer does not end in ``#### `` and its number, or None."""
    if metric.gold(record["answer"]) is None:
        return f"field 'answer' has no '#### NUMBER': {record['answer'][-60:]!r}"
    return None


def harness_prompt(shots: Sequence[Record], question: str) -> str:
    """Examples, then the question, as the harness joins them."""
    shown = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
    return f"{shown}Question: {question}\nAnswer:"


def logquant_prompt(train: Sequence[Record], question: str) -> str:
    """The user turn of LogQuant's script, with the blanks that its source's indentation leaves in it."""
    indent = " " * 8
    lines = ["Please answer the following question by the format, mark the final answer by ####."]
    for number, row in enumerate(LOGQUANT_SHOTS, start=1):
        answer = LOGQUANT_REWORDED.get(row, train[row]["answer"].replace("\n", " "))
        shown = " ".join(train[row]["question"].split())
        lines += [f"{indent}example {number}: ", f"{indent}question: {shown}"]
        lines += [f"{indent}answer: {answer}"]
    lines += [f"{indent}Question for you: ", f"{indent}question: {question}", ""]
    return "\n".join(lines)
