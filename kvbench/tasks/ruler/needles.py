"""RULER's needles in a haystack (niah): sentences with a key and a value, hidden in a long text.

Source: NVIDIA/RULER c3f5e3b, scripts/data/synthetic/niah.py.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from kvbench.tasks.ruler.frame import NIAH, NIAH_PREFIX, NOISE, RulerKind
from kvbench.tasks.ruler.stream import RulerPrompt, Stream, fitting, largest

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
#: possible depths of needles in a text of essays, in percent of its sentences
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int))
#: replacements that turn the whole template into the singular, applied in this order
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))


class Needles:
    """Generator of one niah task at one length.

    Args:
        chat: chat format with the placeholder ``{task}`` (:data:`kvbench.tasks.ruler.frame.CHAT`).
        pairs: the adjective-noun pairs from which keys are drawn.
        text: the essays, for the haystack ``essay``.
    """

    def __init__(
        self,
        kind: RulerKind,
        stream: Stream,
        chat: str,
        pairs: Sequence[str],
        text: str = "",
        sentences: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.kind, self.stream, self.pairs, self.sentences = kind, stream, pairs, sentences
        self.keys = max(kind.keys, kind.queries)
        self.words = re.sub(r"\s+", " ", text).split(" ") if kind.haystack == "essay" else []
        self.template, self.prefix, self.named = chat.replace("{task}", NIAH) + NIAH_PREFIX, NIAH_PREFIX, kind.value
        if kind.queries * kind.values == 1:
            for plural, singular in SINGULAR:
                self.template = self.template.replace(plural, singular)
                self.prefix = self.prefix.replace(plural, singular)
            self.named = kind.value[:-1]
        self.step = 500 if kind.haystack == "essay" else 25 if stream.length >= 4096 else 5
        self.units = largest(self.make, stream, self.step, kind.budget)

    def next(self) -> tuple[RulerPrompt, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        return fitting(self.make, self.stream, self.units, self.step, self.kind.budget)

    def make(self, units: int) -> RulerPrompt:
        """Make a prompt whose haystack has `units` words of essays, or `units` noise paragraphs or other needles.

        Raises:
            ValueError: there are fewer units than needles.
        """
        keys: list[str] = []
        values: list[list[str]] = []
        needles: list[str] = []
        for _ in range(self.keys):
            keys.append(self._draw(self.kind.key))
            values.append([])
            for _ in range(self.kind.values):
                values[-1].append(self._draw(self.kind.value))
                needles.append(NEEDLE.format(kind=self.kind.value, key=keys[-1], value=values[-1][-1]))
        self.stream.shuffle(needles)
        context = self._essay(needles, units) if self.kind.haystack == "essay" else self._lines(needles, units)
        asked = self.stream.random.sample(range(self.keys), self.kind.queries)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        prompt = self.template.format(type_needle_v=self.named, context=context, query=query)
        prefix = self.prefix.format(type_needle_v=self.named, query=query)
        return RulerPrompt(prompt, prefix, tuple(value for i in asked for value in values[i]), query)

    def _draw(self, kind: str) -> str:
        if kind == "words":
            return self.stream.random.choice(self.pairs)
        if kind == "numbers":
            return str(self.stream.random.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.stream.random.getrandbits(128), version=4))

    def _lines(self, needles: Sequence[str], units: int) -> str:
        if self.kind.haystack == "noise":
            lines = [NOISE] * units
        else:
            lines = [
                NEEDLE.format(kind=self.kind.value, key=self._draw(self.kind.key), value=self._draw(self.kind.value))
                for _ in range(units)
            ]
        places = sorted(self.stream.random.sample(range(units), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _essay(self, needles: Sequence[str], units: int) -> str:
        assert self.sentences is not None
        repeats = -(-units // len(self.words))
        parts = self.sentences(" ".join((self.words * repeats)[:units]).strip())
        depths = sorted(self.stream.random.sample(DEPTHS, len(needles)))
        places = [0, *(int(len(parts) * (depth / 100)) for depth in depths), len(parts)]
        pieces = []
        for i, (begin, end) in enumerate(itertools.pairwise(places)):
            pieces.append(" ".join(parts[begin:end]))
            if i < len(needles):
                pieces.append(needles[i])
        return " ".join(pieces)
