"""RULER's tasks of counting words, in a list (cwe) and in a coded text (fwe), and its variable tracking (vt).

Source: NVIDIA/RULER c3f5e3b, scripts/data/synthetic/common_words_extraction.py, freq_words_extraction.py and
variable_tracking.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from kvbench.errors import DataError
from kvbench.tasks.ruler.frame import CWE, CWE_PREFIX, FWE, FWE_PREFIX, NOISE, VT, VT_PREFIX, RulerKind
from kvbench.tasks.ruler.stream import RulerPrompt, Stream, fitting, largest

#: number of words that occur more often than the others (cwe)
COMMON = 10
#: prompts shorter than this have fewer repetitions
SHORT = 4096


class CommonWords:
    """Generator of cwe at one length; every prompt begins with a worked example.

    Args:
        chat: chat format with the placeholder ``{task}``. The worked example is inside it and has no format of its own.
        words: the words to draw from, shuffled.
        more: a longer list, for prompts that need more words than `words` has.

    Raises:
        DataError: the length needs more words than both lists have.
    """

    def __init__(
        self, kind: RulerKind, stream: Stream, chat: str, words: Sequence[str], more: Sequence[str] = ()
    ) -> None:
        self.kind, self.stream, self.words, self.more = kind, stream, words, more
        self.before, _, self.after = chat.partition("{task}")
        self.units = largest(
            self.make,
            stream,
            COMMON,
            kind.budget,
            first=4096,
            upper=lambda per_word: int(stream.length // per_word) * 2,
        )

    def next(self) -> tuple[RulerPrompt, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        return fitting(self.make, self.stream, self.units, COMMON, self.kind.budget)

    def make(self, units: int) -> RulerPrompt:
        """Make a prompt whose list has `units` different words."""
        short = self.stream.length < SHORT
        shot, shot_answers = self._list(20, 3, 1) if short else self._list(40, 10, 3)
        words, answers = self._list(units, 6, 1) if short else self._list(units, 30, 3)
        example = f"{CWE.format(context=shot)}{CWE_PREFIX} {numbered(shot_answers)}"
        prompt = f"{self.before}{example}\n{CWE.format(context=words)}{self.after}{CWE_PREFIX}"
        return RulerPrompt(prompt, CWE_PREFIX, tuple(answers), "")

    def _list(self, count: int, often: int, seldom: int) -> tuple[str, list[str]]:
        """Return a numbered list in which the first ten of `count` drawn words occur more often, and these ten."""
        if count > max(len(self.words), len(self.more)):
            raise DataError(
                f"dataset ruler: cwe with {self.stream.length} tokens needs {count} different words; the word lists "
                f"have {max(len(self.words), len(self.more))}.\n"
                "  hint: set dataset.english_words=FILE, RULER's own english_words.json, or leave out cwe"
            )
        drawn = self.stream.random.sample(self.words if count <= len(self.words) else self.more, count)
        common, others = drawn[:COMMON], drawn[COMMON:]
        listed = common * often + others * seldom
        self.stream.shuffle(listed)
        return numbered(listed), common


def numbered(words: Sequence[str]) -> str:
    """Return words in one line, each after its number: ``1. apple 2. pear``."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


class FrequentWords:
    """Generator of fwe at one length: random words whose counts follow a zeta distribution with exponent 2."""

    def __init__(self, kind: RulerKind, stream: Stream, chat: str) -> None:
        self.kind, self.stream = kind, stream
        self.template = chat.replace("{task}", FWE) + FWE_PREFIX
        self.most = stream.length - kind.budget
        self.step = self.most // 32
        vocabulary, count = self._vocabulary(), self.most // 6
        while stream.count(self._text(vocabulary, count)) < self.most:
            count += self.step
        self.units = count - self.step

    def next(self) -> tuple[RulerPrompt, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        vocabulary, count = self._vocabulary(), self.units
        while (tokens := self.stream.count(prompt := self._text(vocabulary, count))) > self.most:
            count -= self.step
            if count <= 0:
                raise DataError(
                    f"dataset ruler: {self.stream.length} tokens are too few for the smallest prompt of fwe.\n"
                    "  hint: choose larger dataset.lengths"
                )
        return RulerPrompt(prompt, FWE_PREFIX, tuple(vocabulary[1:4]), ""), tokens + self.kind.budget

    def _vocabulary(self) -> list[str]:
        words = sorted(set(self.stream.names(ascii_lowercase, 6, self.most // 50)))
        self.stream.shuffle(words)
        words[0] = "..."
        return words

    def _text(self, vocabulary: Sequence[str], count: int) -> str:
        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (count * (ranks**-2.0) / (math.pi**2 / 6)).astype(int)
        words = [word for word, repeats in zip(vocabulary, counts, strict=True) for _ in range(repeats)]
        self.stream.shuffle(words)
        return self.template.format(context=" ".join(words))


#: assignments that follow the first one of a chain
HOPS = 4
#: length in tokens of the worked example before each question, and the value in it
EXAMPLE_LENGTH, EXAMPLE_VALUE = 500, "12345"


class Tracking:
    """Generator of variable tracking at one length; every prompt begins with a worked example.

    The example is inside the chat format `chat` and has no format of its own.
    """

    def __init__(self, kind: RulerKind, stream: Stream, chat: str) -> None:
        self.kind, self.stream = kind, stream
        self.plain, self.template = VT + VT_PREFIX, chat.replace("{task}", VT) + VT_PREFIX
        units = largest(self._example, stream, 5, 0, length=EXAMPLE_LENGTH)
        draft, _ = fitting(self._example, Stream(stream.count, EXAMPLE_LENGTH), units, 5, 0)
        self.example = f"{draft.prompt} {' '.join(draft.answers)}\n"
        self.step = 10 if stream.length >= 4096 else 5
        self.units = largest(self.make, stream, self.step, kind.budget, extra=stream.count(self.example))

    def next(self) -> tuple[RulerPrompt, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        return fitting(self._with_example, self.stream, self.units, self.step, self.kind.budget)

    def _with_example(self, units: int) -> RulerPrompt:
        draft = self.make(units)
        place = draft.prompt.index(VT[:20])
        prompt = f"{draft.prompt[:place]}{self._varied()}\n{draft.prompt[place:]}"
        return RulerPrompt(prompt, draft.prefix, draft.answers, draft.question)

    def make(self, units: int) -> RulerPrompt:
        """Make a prompt of `units` noise paragraphs, without the worked example."""
        return self._make(self.template, units, 5, None)

    def _example(self, units: int) -> RulerPrompt:
        return self._make(self.plain, units, 3, EXAMPLE_VALUE)

    def _make(self, template: str, units: int, letters: int, fixed: str | None) -> RulerPrompt:
        names = self.stream.names(ascii_uppercase, letters, HOPS + 1)[: HOPS + 1]
        number = fixed or str(self.stream.numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {number}"]
        chain += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
        lines = [NOISE] * units
        places = sorted(self.stream.random.sample(range(units), len(chain)))
        for j, (place, statement) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + j, statement)
        context = "\n".join(lines).replace(". \n", ".\n")
        prompt = template.format(context=context, query=number, num_v=HOPS + 1)
        return RulerPrompt(prompt, VT_PREFIX.format(query=number, num_v=HOPS + 1), tuple(names), number)

    def _varied(self) -> str:
        """Return the worked example with fresh names and a fresh number."""
        example = self.example
        for name in example.split()[-(HOPS + 1) :]:
            fresh = "".join(self.stream.random.choices(ascii_uppercase, k=len(name)))
            example = example.replace(name, fresh)
        return example.replace(EXAMPLE_VALUE, str(self.stream.numbers.randint(10000, 99999)))
