"""Which tests `make test-gpu PART=i/n` runs, and in which order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

FILES = (
    "tests/a.py",
    "tests/decoding/test_graphs.py",
    "tests/attention/test_fused.py",
    "tests/attention/test_triton_gpu.py",
)


def items(count: int) -> list[Any]:
    """Tests of four files in turn, of which the last two need a GPU."""
    return [
        SimpleNamespace(
            nodeid=f"{FILES[number % 4]}::test[{number}]",
            path=Path("/somewhere") / FILES[number % 4],
            get_closest_marker=lambda name, marked=number % 4 > 1: name if marked else None,
        )
        for number in range(count)
    ]


def chosen(count: int, part: str) -> tuple[list[str], list[str]]:
    """Names of the tests that run, and of those that are left out."""
    found, left = items(count), []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    options = {"--methods": None, "part": conftest.part(part)}
    config: Any = SimpleNamespace(getoption=options.__getitem__, hook=hook)
    conftest.pytest_collection_modifyitems(config, found)
    return [item.nodeid for item in found], [item.nodeid for item in left]


def test_each_test_is_in_one_of_the_parts_and_these_are_of_a_size() -> None:
    """Whatever the order of collection: neighbours, which differ in a kernel, are not dealt by turns."""
    names = {item.nodeid for item in items(400)}
    parts = [chosen(400, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for found, _ in parts for name in found) == sorted(names)
    for found, left in parts:
        assert {*found, *left} == names and 100 < len(found) < 167
        assert {int(name.split("[")[1][:-1]) % 2 for name in found} == {0, 1}


def test_files_that_take_long_come_first() -> None:
    """In the order of their table; that of tests on a GPU is another."""
    found, left = chosen(8, "1/1")
    assert not left
    assert [name.split("::")[0] for name in found[:6]] == [FILES[3]] * 2 + [FILES[2]] * 2 + [FILES[1]] * 2


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "1/0", "a/b"])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        conftest.part(text)
