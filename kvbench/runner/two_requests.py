"""Samples of two requests: reasoning about a text, and an answer to a second prompt that quotes the reasoning.

Each request is generated as any other answer, in this process (:class:`TwoRequests`) or by a server
(:mod:`kvbench.runner.served`); both make one row of the two (:func:`joined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbench.results.samples import Row, unsealed
from kvbench.runner.rows import Report
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import Generate, ReasonThenAnswer

if TYPE_CHECKING:
    from kvbench.runner.answers import Answers

#: entries of the row that describe the second request; all others are those of the first one
_OF_ANSWER = ("prediction", "finish", "nll")


@dataclass(frozen=True)
class TwoRequests:
    """Strategy for samples with :class:`kvbench.tasks.work.ReasonThenAnswer`, over that of single answers."""

    answers: Answers
    task: Task

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Generate reasoning and answers of a batch; arguments as for :meth:`kvbench.runner.rows.Strategy.rows`."""
        reasoned = self.answers.rows([reasoning_request(sample) for sample in samples], first=first, report=report)
        asked = [answer_request(sample, row) for sample, row in zip(samples, reasoned, strict=True)]
        answered = self.answers.rows(asked, first=False, report=report)
        return [joined(self.task, *three) for three in zip(samples, reasoned, answered, strict=True)]


def reasoning_request(sample: Sample) -> Sample:
    """Return the first request of a sample, as a sample with one answer."""
    return replace(sample, work=Generate())


def answer_request(sample: Sample, reasoned: Row) -> Sample:
    """Return the second request of a sample, which quotes the reasoning in the row of the first one.

    Its name differs, so that its tokens are drawn with another seed.
    """
    work = sample.work
    assert isinstance(work, ReasonThenAnswer)
    prompt = work.before + unsealed(reasoned["prediction"]).strip() + work.after
    name, new_tokens = f"{sample.id}+answer", work.max_new_tokens
    return replace(
        sample, id=name, prompt=prompt, context_span=None, max_new_tokens=new_tokens, work=Generate(), target=None
    )


def joined(task: Task, sample: Sample, reasoned: Row, answered: Row) -> Row:
    """Return the row of a sample from the rows of its two requests.

    Answer, score and likelihood are those of the second request; prompt, bytes and times those of the first one, which
    has the text. ``tokens`` are those of both, and ``reasoning`` has the first one's text and how it ended.
    """
    reasoning = {"text": reasoned["prediction"], "finish": reasoned["finish"], "tokens": len(reasoned["tokens"])}
    row = {
        **reasoned,
        **{name: answered[name] for name in _OF_ANSWER},
        "tokens": [*reasoned["tokens"], *answered["tokens"]],
        "reasoning": reasoning,
    }
    return {**row, **scored(task, sample, unsealed(row["prediction"]), row)}
