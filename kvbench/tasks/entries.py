"""Prompts made from records and a template, for data sets that are described by configuration only."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.tasks.records import Record
from kvbench.tasks.template import Span


@dataclass(frozen=True)
class Entry:
    """One record converted to a prompt, to which few-shot examples can still be added.

    Args:
        context: half-open character range of the context in `prompt`; None if the data set does not define a context.
        query: the question, with which a retriever searches the context; may be empty.
        options: number of options of a multiple-choice question (metric ``choice``); 0 for other metrics.
    """

    prompt: str
    context: Span | None
    query: str
    answers: tuple[str, ...]
    record: Record
    options: int = 0

    @property
    def target(self) -> str:
        """The first answer as it would follow the prompt: after a space, unless the prompt ends in whitespace."""
        return self.answers[0] if self.prompt[-1:].isspace() else f" {self.answers[0]}"
