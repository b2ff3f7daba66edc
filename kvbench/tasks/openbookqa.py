"""OpenBookQA (Mihaylov et al. 2018): questions of elementary science with four choices, answered by a letter.

LogQuant's Figure 2 looks at attention over its prompts (and GSM8K's); the paper gives neither a prompt nor a score, so
this is the plain few-shot form. Its prompts are short: for caches, what counts is that the answer depends on all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvbench.errors import DataError
from kvbench.tasks import data
from kvbench.tasks.base import Sample, Task, check_shots
from kvbench.tasks.data import HubSource, Record
from kvbench.tasks.records import FILLED_TEXT
from kvbench.util.schema import MOST_TOKENS, bounded

#: fields of a question, in one form whatever file it came from
FIELDS = ("stem", "choices", "key")


@dataclass(frozen=True, kw_only=True)
class OpenBookQA(Task):
    """The test split's 500 questions.

    Args:
        name: of the data set, for the results.
        path: a folder with ``train`` and ``test`` files; None: the hub.
        source: the hub's files.
        limit: questions, from the first; None: all.
        shots: first training questions shown before each.
        max_new_tokens: tokens to generate.
    """

    version = 1
    scorer_version = 1

    name: str = "openbookqa"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    limit: int | None = bounded(None, minimum=1)
    shots: int = bounded(5, minimum=0, maximum=64)
    max_new_tokens: int = bounded(8, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError for a repository that is none."""
        self.source.check()

    @cached_property
    def splits(self) -> dict[str, list[Record]]:
        """``train`` and ``test`` as :data:`FIELDS`. Raises DataError where they cannot be had."""
        what = f"dataset {self.name}"
        if self.path is not None and data.is_single(self.path):
            raise DataError(
                f"{what}: dataset.path={self.path} is one file.\n  hint: a folder with train and test files"
            )
        found = {split: data.find(self.source, split, self.path, what) for split in ("train", "test")}
        splits = {
            split: [plain(record, where) for where, record in data.placed_records(place)]
            for split, place in found.items()
        }
        check_shots(self.shots, splits["train"], found["train"])
        return splits

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """What has to be fetched."""
        return ((self.source, split) for split in ("train", "test"))

    def samples(self) -> Iterator[Sample]:
        """The first `limit` questions."""
        shown = "".join(f"{question(r)} {r['key']}\n\n" for r in self.splits["train"][: self.shots])
        for index, record in enumerate(self.splits["test"][: self.limit]):
            yield Sample(
                id=f"openbookqa/{index}",
                task="openbookqa",
                prompt=shown + question(record),
                answers=(record["key"],),
                max_new_tokens=self.max_new_tokens,
                stop=("\n",),
                target=f" {record['key']}",
            )

    def identity(self) -> dict[str, Any]:
        """What determines the samples but for how many there are."""
        return {
            "target": "openbookqa",
            "version": self.version,
            "sha256": {split: data.fingerprint(records, FIELDS) for split, records in self.splits.items()},
            "shots": self.shots,
            "max_new_tokens": self.max_new_tokens,
        }

    def notes(self) -> dict[str, Any]:
        """What a result says about the data beside the identity."""
        return {"records": {split: len(records) for split, records in self.splits.items()}}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """1 where the first letter A to D that stands alone is the right one."""
        found = re.search(r"\b([A-D])\b", prediction)
        return {"score": float(found is not None and found[1] == sample.answers[0])}


def question(record: Record) -> str:
    """A question with its choices, up to the answer."""
    choices = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", record["choices"], strict=True))
    return f"Question: {record['stem']}\n{choices}\nAnswer:"


def plain(record: Record, where: str) -> Record:
    """A record of the authors' files (``question``: ``stem``, ``choices``) or of the hub's in one form.

    Raises:
        DataError: it has neither form, or no letter A to D as its answer.
    """
    try:
        asked = record.get("question")
        if isinstance(asked, dict):
            stem, options = asked["stem"], {c["label"]: c["text"] for c in asked["choices"]}
        else:
            stem = record["question_stem"]
            options = dict(zip(record["choices"]["label"], record["choices"]["text"], strict=True))
        choices: Sequence[str] = [options[letter] for letter in "ABCD"]
        key = record["answerKey"].strip()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: is no question of OpenBookQA ({type(error).__name__}: {error}).") from error
    FILLED_TEXT.check(stem, "stem", where)
    for choice in choices:
        FILLED_TEXT.check(choice, "choices", where)
    if key not in ("A", "B", "C", "D"):
        raise DataError(f"{where}: field 'answerKey' is '{key}'; expected A, B, C or D.")
    return {"stem": stem, "choices": list(choices), "key": key}
