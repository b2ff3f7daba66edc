"""The methods under contract: all of kvbench and of the examples, or those of one folder (``pytest --methods=DIR``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.methods import load_method
from kvbench.quantizers.spec import taken
from kvbench.util.confdir import group_options

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "configs"
#: the folder of ``--methods``, if it is given
folder: Path | None = None


def choose(given: str | None) -> None:
    """Put the methods of a folder under contract, in place of all others, and check that they can be made.

    Raises:
        pytest.UsageError: there is no such folder, it has no method, or one of them cannot be made.
    """
    global folder
    folder = None if given is None else Path(given).absolute()
    if folder is None:
        return
    if not folder.is_dir():
        raise pytest.UsageError(f"--methods={given}: there is no such folder; name one that holds method/foo.yaml")
    sys.path.insert(0, str(folder))  # as --config-dir does
    if not own("method"):
        raise pytest.UsageError(
            f"--methods={given}: has no method; put method/foo.yaml, or method/foo.py, into it (docs/add-your-own.md)"
        )
    for path in own("method"):
        try:
            load_method(str(path))
        except KvbenchError as error:
            raise pytest.UsageError(f"--methods={given}: {path.relative_to(folder)}: {error}") from error


def own(group: str, place: Path | None = None) -> list[Path]:
    """The files of a group in the folder, or in another one, in alphabetical order."""
    place = place or folder
    return [path for path in group_options(group, place).values() if place in path.parents]


def names() -> list[str]:
    """The methods: names of ``conf/method``, and paths of files outside of it."""
    return [*map(str, own("method"))] if folder else [*group_options("method"), *map(str, toys())]


def toys() -> list[Path]:
    """Methods from outside the package, one for each base class."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return [*sorted(Path(__file__).parent.glob("*.yaml")), *own("method", EXAMPLES)]


def quantizers(name: str) -> tuple[str, ...]:
    """The presets that a method takes: its default first, then the others in the order of its `takes`."""
    method = load_method(name)
    default = method.quantizer.name if method.quantizer else "none"
    extra = Path(name).parents[1] if "/" in name else None
    return tuple(dict.fromkeys([default, *taken(method.takes, extra)]))
