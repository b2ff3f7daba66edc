"""Output folders of this package's commands: results/ and docs/ only with ``--write``, else results/trials.

A table of fewer samples replaces one of more, and one without its picture one with it, only with ``--write
--replace``; without, it is kept as a trial, and the command names what it has less of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments import stored

ROOT = Path(__file__).resolve().parents[1]
#: folder of the tables that nobody asked to keep, below the folder of results; git ignores it
TRIALS = "trials"
#: places that a message about lost samples names
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options of a command line about writing.

    Args:
        write: True to write below results/ and docs/.
        replace: True to replace tables of more samples, too.
    """

    write: bool = False
    replace: bool = False


@dataclass(frozen=True)
class Place:
    """The file or folder that a command writes to.

    Args:
        path: the file or folder.
        said: what to print about it; empty if it is the place that was asked for.
        refused: True if a stored table was not replaced.
    """

    path: Path
    said: str = ""
    refused: bool = False

    def say(self) -> int:
        """Print where the files are, and return the exit status: 1 if a stored table was not replaced."""
        print(f"-> {self.path}", flush=True)
        if self.said:
            print(self.said, file=sys.stderr, flush=True)
        return int(self.refused)


def positive(text: str) -> int:
    """Parse a number of samples, tokens or processes, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--write`` and ``--replace`` to a command."""
    parser.add_argument("--write", action="store_true", help="write below results/ (default: to results/trials)")
    parser.add_argument("--replace", action="store_true", help="with --write: replace a table of more samples, too")


def choice(arguments: argparse.Namespace) -> Choice:
    """Return what the options of :func:`add_options` say."""
    return Choice(write=arguments.write, replace=arguments.replace)


def place_result(
    wanted: Path,
    chosen: Choice,
    new: Mapping[str, int] | None = None,
    before: Mapping[str, int] | None = None,
    pictures: Sequence[Path] = (),
    unchanged: bool = False,
) -> Place:
    """Return where to write a result.

    Args:
        wanted: the file or folder that it belongs to.
        chosen: the command line's choice.
        new: number of samples of each of its parts, by name.
        before: the same of the stored result; None without one.
        pictures: the result's pictures below `wanted`, of which an old one must not stay beside new numbers.
        unchanged: True if the numbers are those of the stored result, so that its pictures are right.
    """
    trial = trial_of(wanted)
    if not chosen.write and guarded(wanted):
        _forget(pictures, wanted, trial)
        return Place(trial, f"a trial: add --write to write to {wanted}")
    counts = new or {}
    fewer = [name for name, count in (before or {}).items() if counts.get(name, 0) < count]
    lost = [f"{name}: {counts.get(name, 0)} in place of {(before or {})[name]}" for name in fewer[:NAMED]]
    if len(fewer) > NAMED:
        lost.append(f"and {len(fewer) - NAMED} more")
    stale = [picture for picture in pictures if picture.exists() and not drawable() and not unchanged]
    if stale:
        lost.append(f"{stale[0].name} cannot be drawn without matplotlib (pip install 'kvbench[plot]')")
    if not lost or (chosen.write and chosen.replace):
        for picture in stale:
            picture.unlink()
        return Place(wanted, f"removed, as matplotlib is not installed: {', '.join(map(str, stale))}" if stale else "")
    _forget(pictures, wanted, trial)
    said = f"{wanted} was not replaced: {'; '.join(lost)}.\n  hint: add --write --replace to replace it all the same"
    return Place(trial, said, refused=True)


def stored_counts(path: Path, counts: Callable[[Any], Mapping[str, int]]) -> Mapping[str, int] | None:
    """Return the samples of a stored JSON file by part, which `counts` reads from it; None without the file."""
    return counts(stored.content(path)) if path.exists() else None


def measurement_counts(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of a file of measurements."""
    return {"rows": len(content["rows"])}


def guarded(path: Path) -> bool:
    """Return True for a place below results/ or docs/, of the repository or of the current folder, but no trial."""
    whole = path.resolve()
    for root in (ROOT, Path.cwd()):
        results = root / "results"
        if whole.is_relative_to(root / "docs") or whole.is_relative_to(results):
            return not any(whole.is_relative_to(results / name) for name in (TRIALS, "runs"))
    return False


def trial_of(path: Path) -> Path:
    """Return the place of a trial: the same path below results/trials, or a folder trials beside the place."""
    whole = path.resolve()
    for root in (ROOT, Path.cwd()):
        if whole.is_relative_to(root / "results"):
            return root / "results" / TRIALS / whole.relative_to(root / "results")
    return path.parent / TRIALS / path.name


def drawable() -> bool:
    """Return True if pictures can be drawn."""
    return find_spec("matplotlib") is not None


def _forget(pictures: Sequence[Path], wanted: Path, trial: Path) -> None:
    """Remove the pictures of an earlier trial, which may not be drawn again."""
    for picture in pictures:
        (trial / picture.relative_to(wanted)).unlink(missing_ok=True)
