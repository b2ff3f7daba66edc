"""OpenBookQA (Mihaylov et al. 2018): questions on elementary science with four options, answered by a letter.

LogQuant's Figure 2 shows attention over prompts of this data set (and of GSM8K). The paper gives neither prompts nor
scores, so this is the plain few-shot form. The prompts are short, but each answer depends on the whole prompt. The data
set itself is described by conf/dataset/openbookqa.yaml; this class keeps the run ids from before that file existed, and
reports malformed records early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import DataError
from kvbench.metrics.answers import Metric
from kvbench.tasks import data
from kvbench.tasks.data import Record
from kvbench.tasks.from_records import Records
from kvbench.tasks.records import FILLED_TEXT
from kvbench.tasks.template import Entry, choice_options, lookup
from kvbench.util.schema import MOST_TOKENS, bounded

#: fields of the question and of its options, in the authors' files or on the hub
STEM, CHOICES = "question.stem|question_stem", "question.choices|choices"


@dataclass(frozen=True, kw_only=True)
class OpenBookQA(Records):
    """The data set OpenBookQA: the 500 multiple-choice questions of its test split, with few-shot examples.

    The fields are those of :class:`Records`, with other defaults.
    """

    name: str = "openbookqa"
    template: str = f"Question: {{{STEM}}}\n{{choices}}\nAnswer:"
    choices: str | None = CHOICES
    answer: str = "answerKey"
    metric: Metric = "choice"
    shots: int = bounded(5, minimum=0, maximum=64)
    max_new_tokens: int = bounded(8, minimum=1, maximum=MOST_TOKENS)

    @property
    def _splits(self) -> tuple[str, ...]:
        return (self.examples, self.split)

    def entry(self, record: Record, place: str) -> Entry:
        """See :meth:`Records.entry`. The fields have the names of the authors' files or of the hub's files.

        Raises:
            DataError: the question, an option or the answer is missing or empty, or the options are not labelled A to
                D.
        """
        labels = [label for label, _ in choice_options(lookup(record, CHOICES, place), "choices", place)]
        if labels != list("ABCD"):
            raise DataError(f"{place}: field 'choices' has the labels {', '.join(labels)}; expected A, B, C, D.")
        FILLED_TEXT.check(lookup(record, STEM, place), "stem", place)
        FILLED_TEXT.check(lookup(record, self.answer, place), self.answer, place)
        return super().entry(record, place)

    def identity(self) -> dict[str, Any]:
        """Return checksums of both splits, and the prompt's options.

        The authors' files and the hub's files name their fields differently, but give the same checksums.
        """
        return {
            "target": "openbookqa",
            "version": self.version,
            "sha256": {
                split: data.records_fingerprint(map(_plain_record, entries), ("stem", "choices", "key"))
                for split, entries in self.entries.items()
            },
            "shots": self.shots,
            "max_new_tokens": self.max_new_tokens,
        }


def _plain_record(entry: Entry) -> Record:
    choices = [text for _, text in choice_options(lookup(entry.record, CHOICES, ""), "choices", "")]
    return {"stem": lookup(entry.record, STEM, ""), "choices": choices, "key": entry.answers[0]}
