"""RULER's question answering (qa): a question of SQuAD or HotpotQA, with its documents hidden among others.

Source: NVIDIA/RULER c3f5e3b, scripts/data/synthetic/qa.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.errors import DataError
from kvbench.tasks.ruler.frame import QA, QA_PREFIX, RulerKind
from kvbench.tasks.ruler.stream import RulerPrompt, Stream, fitting, largest
from kvbench.tasks.ruler.texts import RulerQuestion

#: number of documents by which prompts are made longer and shorter
STEP = 10


class Documents:
    """Generator of one qa task at one length; sample i asks question i.

    `documents` and `questions` are all those of the data set.
    """

    def __init__(
        self, kind: RulerKind, stream: Stream, chat: str, documents: Sequence[str], questions: Sequence[RulerQuestion]
    ) -> None:
        self.kind, self.stream, self.documents, self.questions = kind, stream, documents, questions
        self.before, _, self.after = chat.partition("{task}")
        self.index = 0
        self.units = largest(self.make, stream, STEP, kind.budget)

    def next(self) -> tuple[RulerPrompt, int]:
        """See :meth:`kvbench.tasks.ruler.task.Generator.next`.

        Raises:
            DataError: the data set has no further question.
        """
        if self.index >= len(self.questions):
            raise DataError(
                f"dataset ruler: the questions end after {len(self.questions)}.\n"
                f"  hint: set dataset.limit={len(self.questions)}"
            )
        drafted = fitting(self.make, self.stream, self.units, STEP, self.kind.budget)
        self.index += 1
        return drafted

    def make(self, units: int) -> RulerPrompt:
        """Make a prompt of `units` documents for the current question."""
        question = self.questions[self.index]
        chosen = [self.documents[i] for i in self._chosen(question, units)]
        self.stream.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, 1))
        task = QA.format(context=context, query=question.text)
        return RulerPrompt(f"{self.before}{task}{self.after}{QA_PREFIX}", QA_PREFIX, question.answers, question.text)

    def _chosen(self, question: RulerQuestion, units: int) -> list[int]:
        """Return the indices of a prompt's documents, before they are shuffled."""
        every = range(len(self.documents))
        if units >= len(every):
            repeats = -(-units // len(every))
            return (list(every) * repeats)[:units]
        missing = max(0, units - len(question.own))
        if missing <= len(question.more):
            return [*question.own, *self.stream.random.sample(question.more, missing)]
        near = {*question.own, *question.more}
        others = [i for i in every if i not in near]
        rest = max(0, missing - len(question.more))
        return [*question.own, *question.more, *self.stream.random.sample(others, rest)]
