"""RULER's variable tracking (vt): chains of assignments, hidden in noise.

Source: NVIDIA/RULER c3f5e3b, scripts/data/synthetic/variable_tracking.py.
"""

from __future__ import annotations

import itertools
from string import ascii_uppercase

from kvbench.tasks.ruler.frame import NOISE, VT, VT_PREFIX, Kind
from kvbench.tasks.ruler.stream import Draft, Stream, fitting, largest

#: assignments that follow the first one of a chain
HOPS = 4
#: length in tokens of the worked example before each question, and the value in it
EXAMPLE_LENGTH, EXAMPLE_VALUE = 500, "12345"


class Tracking:
    """Generator of variable tracking at one length; every prompt begins with a worked example.

    The example is inside the chat format `chat` and has no format of its own.
    """

    def __init__(self, kind: Kind, stream: Stream, chat: str) -> None:
        self.kind, self.stream = kind, stream
        self.plain, self.template = VT + VT_PREFIX, chat.replace("{task}", VT) + VT_PREFIX
        units = largest(self._example, stream, 5, 0, length=EXAMPLE_LENGTH)
        draft, _ = fitting(self._example, Stream(stream.count, EXAMPLE_LENGTH), units, 5, 0)
        self.example = f"{draft.prompt} {' '.join(draft.answers)}\n"
        self.step = 10 if stream.length >= 4096 else 5
        self.units = largest(self.make, stream, self.step, kind.budget, extra=stream.count(self.example))

    def next(self) -> tuple[Draft, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        return fitting(self._with_example, self.stream, self.units, self.step, self.kind.budget)

    def _with_example(self, units: int) -> Draft:
        draft = self.make(units)
        place = draft.prompt.index(VT[:20])
        prompt = f"{draft.prompt[:place]}{self._varied()}\n{draft.prompt[place:]}"
        return Draft(prompt, draft.prefix, draft.answers, draft.question)

    def make(self, units: int) -> Draft:
        """Make a prompt of `units` noise paragraphs, without the worked example."""
        return self._make(self.template, units, 5, None)

    def _example(self, units: int) -> Draft:
        return self._make(self.plain, units, 3, EXAMPLE_VALUE)

    def _make(self, template: str, units: int, letters: int, fixed: str | None) -> Draft:
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
        return Draft(prompt, VT_PREFIX.format(query=number, num_v=HOPS + 1), tuple(names), number)

    def _varied(self) -> str:
        """Return the worked example with fresh names and a fresh number."""
        example = self.example
        for name in example.split()[-(HOPS + 1) :]:
            fresh = "".join(self.stream.random.choices(ascii_uppercase, k=len(name)))
            example = example.replace(name, fresh)
        return example.replace(EXAMPLE_VALUE, str(self.stream.numbers.randint(10000, 99999)))
