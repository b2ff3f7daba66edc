"""Generated programs: the generator's numbers, an interpreter that reads the text, and steps that can be undone."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.programs import (
    LABELS,
    NUMBERS,
    WORDS,
    Streams,
    draw_long_programs,
    draw_programs,
    program_text,
)


def interpret(prompt: str, steps: int) -> str:
    """Run the program of a prompt as its text says."""
    words = prompt.split()
    assert (words[0], words[-4], words[-1]) == ("program", "start", "trace")
    lines = {}
    for i in range(1, len(words) - 4, 8):
        label, amount, _, even, even_jump, _, odd, odd_jump = words[i : i + 8]
        assert words[i + 2] == words[i + 5] == label and (even, odd) == ("even", "odd")
        lines[label] = (amount, even_jump, odd_jump)
    label, register, trace = words[-3], int(words[-2]), []
    for _ in range(steps):
        label = lines[label][1 + register % 2]
        register = (register + int(lines[label][0])) % 64
        trace += [label, str(register)]
    return " ".join(trace)


def test_streams_are_the_generators_of_mini() -> None:
    streams, rngs = Streams([("a", 1), ("b", 2)]), [Rng("a", 1), Rng("b", 2)]
    for n in (3, 2):
        assert streams.bits(n).tolist() == [[rng.bits() for _ in range(n)] for rng in rngs]
    orders = streams.orders(50)
    assert (np.sort(orders, 1) == np.arange(50)).all() and (orders[0] != orders[1]).any()
    values = streams.below(9, 2000)
    assert values.min() == 0 and values.max() == 8


def test_words_are_different() -> None:
    assert len(set(WORDS)) == len(WORDS) == 322 and len(set(LABELS)) == 240


@pytest.mark.parametrize("lines", [2, 17])
def test_a_trace_is_what_the_text_of_the_program_says(lines: int) -> None:
    programs = draw_programs(Streams([("trace", i) for i in range(3)]), lines)
    prompts, traces = programs.prompts(), programs.traces(40)
    assert prompts.shape == (3, 8 * lines + 6)
    for prompt, trace in zip(prompts, traces, strict=True):
        assert program_text(trace) == interpret(program_text(prompt), 40)


def test_a_first_visit_is_a_jump_that_the_trace_has_not_shown() -> None:
    programs = draw_programs(Streams([("first", i) for i in range(3)]), 6)
    first = programs.first_visits(30)
    for row, trace in enumerate(programs.traces(30)):
        words = program_text(programs.prompts()[row]).split()[-3:-1] + program_text(trace).split()
        jumps = [(words[i], int(words[i + 1]) % 2) for i in range(0, len(words) - 2, 2)]
        assert first[row].tolist() == [jump not in jumps[:i] for i, jump in enumerate(jumps)]
    assert first.any(1).all() and (~first).any(1).all()


def test_every_state_has_one_predecessor() -> None:
    programs = draw_programs(Streams([("all", 0)]), 5)
    after = set()
    for line in range(5):
        for register in range(NUMBERS):
            programs.line[:], programs.register[:] = line, register
            after.add(tuple(programs.states(1)[0, :, 0]))
    assert len(after) == 5 * NUMBERS


def test_long_programs_do_not_repeat_themselves_and_do_not_depend_on_each_other() -> None:
    names = [("long", i) for i in range(12)]
    steps = 8 * NUMBERS // 2
    programs = draw_long_programs(Streams(names), 8, steps)
    for states in programs.states(steps).transpose(2, 0, 1):
        assert len({tuple(state) for state in states}) == steps
    again = draw_long_programs(Streams(names[5:6]), 8, steps)
    assert (programs.prompts()[5] == again.prompts()[0]).all()
    plain = draw_programs(Streams(names), 8)
    assert (plain.prompts() != programs.prompts()).any(), "some were drawn again"
