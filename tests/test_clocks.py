"""No test asserts a time: machines differ, and are busy. Tests count imports, calls and compositions instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent

#: functions that read a clock
CLOCKS = {"clock_gettime", "getrusage", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
CLOCKS |= {"process_time_ns", "thread_time", "time", "time_ns", "times"}
MODULES = {"os", "resource", "time"}


def _reads_a_clock(node: ast.AST) -> bool:
    """Return True for ``time.monotonic()`` and its like, as a call, under any of the modules that have one."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in CLOCKS
        and isinstance(call.value, ast.Name)
        and call.value.id in MODULES
        for call in calls
    )


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each target with its value; ``a, b = 1, 2`` is two of them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def timed_asserts(source: str) -> list[int]:
    """Lines of assertions that look at a clock, or at a name that was made from one."""
    tree = ast.parse(source)
    timed: set[str] = set()

    def names(node: ast.AST) -> set[str]:
        return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}

    for _ in range(3):  # times from times
        for target, value in _assignments(tree):
            if names(value) & timed or _reads_a_clock(value):
                timed |= names(target)
    asserts = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return [node.lineno for node in asserts if names(node.test) & timed or _reads_a_clock(node.test)]


def test_such_assertions_are_found() -> None:
    source = """
began = time.perf_counter()
work()
took = time.perf_counter() - began
assert took < 3.0
assert work() and time.process_time() < 2
assert clock.time() == 3 and answer.seconds == 2.0
while time.monotonic() < end:
    pass
"""
    assert timed_asserts(source) == [5, 6]


def test_no_test_asserts_a_time() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("*.py")
        if any(f".{clock}(" in (source := path.read_text(encoding="utf-8")) for clock in CLOCKS)
        for line in timed_asserts(source)
    }
    assert not found
