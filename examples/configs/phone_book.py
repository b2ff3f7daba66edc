"""A telephone book and one question about it: a data set outside the package."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.tasks import Sample, Task

NAMES = "Ada Ben Cleo Dan Eve Finn Gwen Hal Iris Jon Kit Lea Max Nora Otis Pam Quinn Rob Sue Tom".split()


@dataclass(frozen=True, kw_only=True)
class PhoneBook(Task):
    """Find a number in a book of `entries` lines.

    Args:
        name: of the data set, for the results.
        entries: lines of a book, one per name.
        limit: books.
        seed: of names and numbers.
    """

    #: raised when the samples change; `scorer_version` when :meth:`score` does
    version = 1
    scorer_version = 1

    name: str = "phone_book"
    entries: int = 12
    limit: int = 4
    seed: int = 0

    def samples(self) -> Iterator[Sample]:
        """Books that depend on the seed and their number alone, so that a larger limit adds to them."""
        for number in range(self.limit):
            draw = random.Random(f"{self.seed}/{number}")
            book = {name: str(draw.randrange(1000, 10000)) for name in draw.sample(NAMES, self.entries)}
            asked = draw.choice(list(book))
            context = "\n".join(f"The number of {name} is {digits}." for name, digits in book.items())
            yield Sample(
                id=f"phone_book/{number}",
                task="phone_book",
                prompt=f"{context}\nThe number of {asked} is",
                context_span=(0, len(context)),
                query=f"The number of {asked}",
                answers=(book[asked],),
                max_new_tokens=6,
                stop=(".",),
            )

    def identity(self) -> dict[str, Any]:
        """Return what determines the samples but for how many there are."""
        return {"target": "phone_book", "version": self.version, "entries": self.entries, "seed": self.seed}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return 1 where the answer begins with the right number."""
        return {"score": float(prediction.strip().startswith(sample.answers[0]))}
