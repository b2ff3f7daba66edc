"""Records of a data set that is described by data, read and filled into its template."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.tasks.records import Record
from kvbench.tasks.template import Span


@dataclass(frozen=True)
class Entry:
    """One record as a prompt without examples.

    Args:
        prompt: the filled template.
        context: characters of the context in `prompt`.
        query: what a retriever searches with.
        answers: references.
        record: as it is in the file.
        options: how many options the question has (metric ``choice``).
    """

    prompt: str
    context: Span | None
    query: str
    answers: tuple[str, ...]
    record: Record
    options: int = 0

    @property
    def target(self) -> str:
        """The first answer as it follows the prompt: after a space, unless the prompt ends in whitespace."""
        return self.answers[0] if self.prompt[-1:].isspace() else f" {self.answers[0]}"
