"""`reason`: answers of thousands of tokens that are right only if every step of them is.

A sample is a generated program (:mod:`kvbench.tasks.programs`), and the answer its trace, of 50 to 8000 tokens. Each
step needs a line of the program, which a method has packed by then, so that a format whose reads go wrong once in a
few thousand tokens shows little loss over 50 tokens, and fails most answers over 8000. The data set is for
``model=tiny-reason``, which is trained on other programs of this kind; other models are not told what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvbench.errors import ConfigError
from kvbench.metrics.text import prefix_share
from kvbench.tasks.base import Sample, Setup, Task, check_list
from kvbench.tasks.programs import (
    LINE,
    NUMBERS,
    START,
    TRACE,
    WRAPPER,
    Programs,
    Streams,
    draw_long_programs,
    program_text,
)
from kvbench.util.schema import MOST, bounded

#: most lines of a program
MOST_LINES = 160


@dataclass(frozen=True, kw_only=True)
class Reason(Task):
    """The data set `reason`: programs whose trace is the answer.

    Programs depend only on the number of lines, the seed and the sample's index: the same ones are asked for at all
    lengths, a shorter answer is the beginning of a longer one, and a larger `limit` adds samples and changes none.

    Args:
        lengths: tokens of the answers; even, as a step has two.
        lines: number of lines of a program, eight tokens each. The more there are, the more labels look alike.
        limit: number of programs.
        seed: random seed of the programs; training has streams of its own.
    """

    name: str = "reason"
    lengths: tuple[int, ...] = bounded((50, 2000), minimum=2)
    lines: int = bounded(140, minimum=8, maximum=MOST_LINES)
    limit: int = bounded(100, minimum=1, maximum=10_000)
    seed: int = bounded(0, minimum=0, maximum=MOST)

    def check(self) -> None:
        """Raise ConfigError if a length is odd, or so long that the trace of a program would repeat itself."""
        check_list("dataset.lengths", self.lengths, ("even numbers",))
        for length in self.lengths:
            if length % 2:
                hint = f"dataset.lengths=[{length + 1}]"
                raise ConfigError("dataset.lengths", length, "is odd, but a step has two tokens", hint=hint)
        if max(self.lengths) > 2 * self._period:
            lines = -(-max(self.lengths) // NUMBERS)
            raise ConfigError(
                "dataset.lengths",
                max(self.lengths),
                f"is too long: the trace of a program of {self.lines} lines may repeat after {2 * self._period} tokens",
                hint=f"dataset.lines={lines}" if lines <= MOST_LINES else f"dataset.lengths=[{2 * self._period}]",
            )

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if prompt and answer exceed ``model.max_length``, at a token a word."""
        model = config.model
        prompt = LINE * self.lines + WRAPPER
        if not model.random and prompt + max(self.lengths) > model.max_length:
            most = (model.max_length - prompt) // 2 * 2
            raise ConfigError(
                "dataset.lengths",
                max(self.lengths),
                f"exceeds what model.max_length={model.max_length} leaves after a prompt of {prompt} tokens",
                allowed=f"at most {most}" if most > 0 else "no length",
                hint=f"dataset.lengths=[{most}]" if most > 0 else "dataset.lines=8",
            )

    @property
    def _period(self) -> int:
        """Steps for which no program repeats itself."""
        return self.lines * NUMBERS // 2

    @cached_property
    def _programs(self) -> Programs:
        streams = Streams([("kvbench reason", self.version, self.lines, self.seed, i) for i in range(self.limit)])
        return draw_long_programs(streams, self.lines, self._period)

    def samples(self) -> Iterator[Sample]:
        """Yield `limit` samples for each length."""
        prompts = self._programs.prompts()
        traces = self._programs.traces(max(self.lengths) // 2)
        for length in self.lengths:
            for index in range(self.limit):
                yield self._sample(length, index, prompts[index], traces[index, :length])

    def _sample(self, length: int, index: int, prompt: np.ndarray, trace: np.ndarray) -> Sample:
        words = program_text(prompt).split(" ")
        lines = [" ".join(words[first : first + LINE]) for first in range(1, LINE * self.lines + 1, LINE)]
        program = "\n".join([words[0], *lines, ""])
        start = " ".join(words[-3:-1])
        answer = program_text(trace)
        return Sample(
            id=f"program@{length}/{index}",
            task="program",
            length=length,
            prompt=f"{program}{START} {start}\n{TRACE}",
            context_span=(0, len(program)),
            query=f"{START} {start}",
            answers=(answer,),
            target=f" {answer}",
            max_new_tokens=length,
            truncation="refuse",
        )

    def identity(self) -> dict[str, Any]:
        """Return lengths, lines and seed."""
        return {
            "target": "reason",
            "version": self.version,
            "lengths": list(self.lengths),
            "lines": self.lines,
            "seed": self.seed,
        }

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score a trace by its end.

        Returns:
            ``score``: 1 if the trace has all its steps, and the last one is right, else 0; ``words``: the share of its
            words before the first wrong one.
        """
        words, wanted = prediction.split(), sample.answers[0].split()
        ends_right = len(words) == len(wanted) and words[-2:] == wanted[-2:]
        return {"score": float(ends_right), "words": prefix_share(prediction, sample.answers[0])}
