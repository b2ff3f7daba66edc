"""Random numbers, token counts and the search for a prompt's size, as RULER's generators share them.

Source: Hsieh et al., "RULER" (2024); NVIDIA/RULER c3f5e3b, scripts/data/synthetic. Every probe of the search draws from
the same random numbers as the samples, so a prompt depends on the tokenizer, on the length and on all earlier probes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.errors import DataError

#: the seed of every task and length, and of all shuffles, in RULER's own scripts
SEED = 42


@dataclass(frozen=True)
class RulerPrompt:
    """One prompt, as a generator makes it, chat formatting and answer prefix included.

    Args:
        prefix: the answer prefix, with which the prompt ends.
        answers: strings that the answer must contain (any one of them for the two question-answering tasks).
        question: what is asked for, for example the keys of the needles.
    """

    prompt: str
    prefix: str
    answers: tuple[str, ...]
    question: str


class Stream:
    """The random numbers of one task at one length, and the tokenizer with which prompts are measured.

    Args:
        count: function that returns the number of tokens of a text, without special tokens.
        length: number of tokens that a prompt and its answer may have together.
        seed: seed of all random numbers; RULER's is 42.

    Attributes:
        random: the numbers that RULER draws from Python's generator.
        numbers: the numbers that RULER draws from NumPy's generator.
    """

    def __init__(self, count: Callable[[str], int], length: int, seed: int = SEED) -> None:
        self.count, self.length, self.seed = count, length, seed
        self.random = random.Random(seed)
        self.numbers = np.random.RandomState(seed)

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Shuffle a list in place, always with the same permutation for lists of equal length."""
        random.Random(self.seed).shuffle(items)

    def names(self, letters: str, size: int, count: int) -> list[str]:
        """Draw names of `size` letters until `count` different ones have been drawn; return all draws in order."""
        names = ["".join(self.random.choices(letters, k=size)) for _ in range(count)]
        while len(set(names)) < count:
            names.append("".join(self.random.choices(letters, k=size)))
        return names


def largest(
    make: Callable[[int], RulerPrompt],
    stream: Stream,
    step: int,
    budget: int,
    *,
    length: int | None = None,
    extra: int = 0,
    first: int | None = None,
    upper: Callable[[float], int] | None = None,
) -> int:
    """Find the largest number of units with which a prompt fits, as RULER does: by bisection after one probe.

    The prompt, an answer of `budget` tokens and `extra` tokens that will be added must fit into `length` tokens; None
    for ``stream.length``. If nothing fits, the result is `step`.

    Args:
        step: smallest number of units, and the number by which a prompt that is too long is shortened.
        first: number of units of the first probe, from which the tokens per unit are estimated; None for `step`.
        upper: function from the estimated tokens per unit to the largest number of units to try; None for three times
            the number that would fit, at least 2 * `step`.
    """
    length, first = length or stream.length, first or step
    per_unit = stream.count(make(first).prompt) / first
    low, high, best = step, upper(per_unit) if upper else max(int(length / per_unit * 3), 2 * step), None
    while low <= high:
        middle = (low + high) // 2
        if stream.count(make(middle).prompt) + budget + extra <= length:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return step if best is None else best


def fitting(
    make: Callable[[int], RulerPrompt], stream: Stream, units: int, step: int, budget: int
) -> tuple[RulerPrompt, int]:
    """Make a prompt with `units` units; while it is too long, draw another with `step` units fewer.

    `make` may raise ValueError if there are too few units. The result is the prompt, and its length in tokens together
    with the `budget` tokens of the answer.

    Raises:
        DataError: even the smallest prompt is too long.
    """
    while True:
        try:
            draft = make(units)
            tokens = stream.count(draft.prompt) + budget
        except ValueError:  # too few units for the needles, where RULER's own script counts a failed attempt
            tokens = stream.length + 1
        if tokens <= stream.length:
            return draft, tokens
        if units <= step:
            raise DataError(
                f"dataset ruler: {stream.length} tokens are too few for the smallest prompt, which takes {tokens}.\n"
                "  hint: choose larger dataset.lengths"
            )
        units -= step
