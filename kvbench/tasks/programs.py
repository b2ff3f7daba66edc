"""Generated programs whose trace has to be followed step by step, and the words that they are written in.

A program has lines; each has a label, an amount, and two labels to jump to, said word for word::

    bas +3 bas even zon bas odd ku

It starts at a label with a number in its register. Each step jumps to the line's first label if the register is even,
to its second if it is odd, and then adds the amount of the new line to the register, modulo :data:`NUMBERS`. The trace
is the label and the register after each step. Every step reads the new line's amount and jump in the program, so
that one wrong reading makes all that follow wrong: first jumps are a permutation of the lines and so are second ones,
which makes a step reversible, and two different states never meet again.

What is to be read always follows what it is looked up by, at the same distance in program and trace: an amount its
label, a jump its label and the parity or number after it. So one hop of attention finds it, and a small model learns
to. (With lines like `bas +3 zon ku`, it learned to copy jumps from its own trace, and missed a quarter of the others.)

Arrays hold many programs, so that a training can have millions of steps a second. The random numbers are those of
:class:`kvbench.tasks.mini.rng.Rng`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.tasks.mini.rng import Rng

#: values of the register: 0 to 63
NUMBERS = 64
#: amounts: +1 to +9
AMOUNTS = 9
LABELS = tuple(first + middle + last for first in "bdfghjklmnprstvz" for middle in "aeiou" for last in ("", "n", "s"))
PAD, BOS, EOS, UNKNOWN = SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PROGRAM, START, TRACE, EVEN, ODD = "program", "start", "trace", "even", "odd"
#: every token of the model's tokenizer; its number is its place
WORDS = (
    *SPECIAL,
    *(PROGRAM, START, TRACE, EVEN, ODD),
    *(f"+{amount}" for amount in range(1, AMOUNTS + 1)),
    *map(str, range(NUMBERS)),
    *LABELS,
)
_PLACES = {word: place for place, word in enumerate(WORDS)}
_AMOUNT, _NUMBER, _LABEL = _PLACES["+1"], _PLACES["0"], _PLACES[LABELS[0]]
#: tokens of a program beside its lines, with the beginning of sequence: `program`, `start LABEL NUMBER` and `trace`
WRAPPER = 6
#: tokens of a line
LINE = 8


class Streams:
    """Many generators of :class:`Rng` at once.

    Args:
        seeds: labels of each generator.
    """

    def __init__(self, seeds: Sequence[Sequence[object]]) -> None:
        self._state = np.array([Rng(*labels)._state for labels in seeds], np.uint64)

    def bits(self, n: int) -> np.ndarray:
        """Return the next `n` random numbers of each generator, uint64 [B, n]."""
        steps = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = self._state[:, None] + steps
        self._state = state[:, -1]
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

    def below(self, limit: int, n: int) -> np.ndarray:
        """Return `n` random integers in [0, limit) of each generator, int64 [B, n]; `limit` is far below 2^32."""
        return (((self.bits(n) >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)

    def orders(self, n: int) -> np.ndarray:
        """Return a random permutation of 0 ... n - 1 of each generator, [B, n]."""
        return np.argsort(self.bits(n), 1, kind="stable")


@dataclass(frozen=True)
class Programs:
    """B programs of N lines each.

    Args:
        labels: [B, N] label of each line, as a place in :data:`LABELS`.
        amounts: [B, N] amount of each line.
        jumps: [B, 2, N] line to jump to with an even and with an odd register.
        line: [B] line to start at.
        register: [B] number to start with.
    """

    labels: np.ndarray
    amounts: np.ndarray
    jumps: np.ndarray
    line: np.ndarray
    register: np.ndarray

    def prompts(self) -> np.ndarray:
        """Return the tokens of each program up to `trace`, with the beginning of sequence: [B, 8 N + 6]."""
        rows, lines = self.labels.shape
        every = np.arange(rows)[:, None]
        labels = _LABEL + self.labels
        parts = [labels, _AMOUNT + self.amounts - 1]
        for side, parity in enumerate((EVEN, ODD)):
            parts += [labels, np.full_like(labels, _PLACES[parity]), labels[every, self.jumps[:, side]]]
        body = np.stack(parts, -1).reshape(rows, LINE * lines)
        head = np.tile([_PLACES[BOS], _PLACES[PROGRAM]], (rows, 1))
        start = [np.full(rows, _PLACES[START]), _LABEL + self.labels[every[:, 0], self.line], _NUMBER + self.register]
        return np.concatenate([head, body, np.stack([*start, np.full(rows, _PLACES[TRACE])], 1)], 1)

    def traces(self, steps: int) -> np.ndarray:
        """Return the tokens of each trace: label and register after each of `steps` steps, [B, 2 * steps]."""
        every = np.arange(len(self.line))
        tokens = self.states(steps)
        tokens[:, 0] = _LABEL + self.labels[every, tokens[:, 0]]
        tokens[:, 1] += _NUMBER
        return tokens.reshape(2 * steps, -1).T

    def first_visits(self, steps: int) -> np.ndarray:
        """Return where a step takes a jump that the trace has not shown before, bool [B, steps].

        The label of such a step can be read in the program alone; others could be copied from the trace.
        """
        every = np.arange(len(self.line))
        states = self.states(steps)
        lines = np.concatenate([self.line[None], states[:-1, 0]])
        parities = np.concatenate([self.register[None], states[:-1, 1]]) & 1
        taken = np.zeros((len(every), 2, self.labels.shape[1]), bool)
        first = np.empty((len(every), steps), bool)
        for step in range(steps):
            place = (every, parities[step], lines[step])
            first[:, step] = ~taken[place]
            taken[place] = True
        return first

    def states(self, steps: int) -> np.ndarray:
        """Return line and register after each of `steps` steps, [steps, 2, B]."""
        every = np.arange(len(self.line))
        line, register = self.line, self.register
        states = np.empty((steps, 2, len(line)), np.int64)
        for step in range(steps):
            line = self.jumps[every, register & 1, line]
            register = (register + self.amounts[every, line]) % NUMBERS
            states[step] = line, register
        return states


def draw_programs(streams: Streams, lines: int) -> Programs:
    """Draw one program of `lines` lines from each stream."""
    labels = streams.orders(len(LABELS))[:, :lines]
    amounts = 1 + streams.below(AMOUNTS, lines)
    jumps = np.stack([streams.orders(lines), streams.orders(lines)], 1)
    return Programs(labels, amounts, jumps, streams.below(lines, 1)[:, 0], streams.below(NUMBERS, 1)[:, 0])


def draw_long_programs(streams: Streams, lines: int, steps: int) -> Programs:
    """Draw one program from each stream whose trace does not repeat itself within `steps` steps.

    Steps are reversible, so a trace that repeats anything comes back to its start first. With `steps` half of the
    states, which are :data:`NUMBERS` for each line, every second draw is refused. A program does not depend on the
    other ones.
    """
    programs = draw_programs(streams, lines)
    while True:
        states = programs.states(steps)
        back = ((states[:, 0] == programs.line) & (states[:, 1] == programs.register)).any(0)
        if not back.any():
            return programs
        others = draw_programs(streams, lines)
        for one, other in zip(vars(programs).values(), vars(others).values(), strict=True):
            one[back] = other[back]


def program_text(tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text of tokens, without the special ones: words with a space between them."""
    return " ".join(WORDS[token] for token in tokens if token >= len(SPECIAL))
