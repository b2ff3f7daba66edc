"""Commands in README.md and the documents: where they are, what they need, and whether their programs take them.

A block of commands is run by ``make test-docs``. What a machine without GPU and network cannot run is marked above the
block, for all of its commands or for some, counted from 1::

    <!-- needs: gpu -->
    <!-- needs: weights 2-3, network 5 -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: documents about the tree as it is; those in results/ and the changelog tell of measurements and of earlier states
GUIDES = sorted(
    [
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "kvbench").rglob("*.md"),
    ]
)
#: what a command may need that make test-docs does not have
NEEDS = {
    "gpu": "a GPU",
    "network": "the network",
    "weights": "weights from the hub",
    "files": "files of the reader's own",
    "minutes": "more than a few minutes",
    "server": "a reader who stops it",
    "cluster": "a cluster, or several machines",
    "package": "a package that the tests do not install",
}
#: beginnings of commands, after settings of the environment; other lines of a block (git, cd, pip) are not ours
_START = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:python -m|make|torchrun) ")
_MARK = re.compile(r"^\s*<!-- needs: (?P<needs>.+?) -->\s*$")
_ITEM = re.compile(r"(?P<need>\w+)(?P<numbers>(?: \d+(?:-\d+)?)*)")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*)\s*$")
_SHELL = ("", "sh", "shell", "bash", "console")


@dataclass(frozen=True)
class Command:
    """A command of a document.

    Args:
        document: the file, from the repository's root.
        text: the command, without its comment.
        inline: True for a command in running text, which is not run.
        needs: what it needs, by a mark above its block; None if it is run.
    """

    document: str
    text: str
    inline: bool
    needs: str | None = None

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def commands(path: Path) -> list[Command]:
    """Return the commands of a document, in order.

    Raises:
        ValueError: a mark names an unknown need, or a command that its block does not have.
    """
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    found = []
    for mark, block in _blocks(text):
        lines = [_bare(line) for line in re.sub(r"\\\n\s*", "", "\n".join(block)).splitlines()]
        lines = [line for line in lines if _START.match(line)]
        needs = _needs(mark, len(lines), name)
        found += [Command(name, line, False, needs.get(number)) for number, line in enumerate(lines, 1)]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:python -m |make )[^`]+)`", re.sub(r"\n\s*", " ", prose))
    return found + [Command(name, line.strip(), True) for line in inline]


def _bare(line: str) -> str:
    """Return a line without its comment."""
    return line.partition(" #")[0].strip()


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each block of shell lines, fenced or indented, with the mark above it (empty if it has none)."""
    mark, block, fence, shell, before = "", list[str](), "", False, ""
    for line in [*text.splitlines(), ""]:
        if fence:
            if line.strip() == fence:
                if shell and block:
                    yield mark, block
                fence, block, mark = "", [], ""
            else:
                block.append(line)
            continue
        opening = _FENCE.match(line)
        if line.startswith("    ") and opening is None and (block or not before.strip() or _MARK.match(before)):
            block.append(line)
        elif line.strip() or opening is not None:
            if block:
                yield mark, block
                block, mark = [], ""
            match = _MARK.match(line)
            if opening is not None:
                fence, shell = opening["fence"], opening["language"] in _SHELL
            else:
                mark = match["needs"] if match else ""
        before = line
    if block:
        yield mark, block


def _needs(mark: str, count: int, name: str) -> dict[int, str]:
    """Return what the commands of a block need, by number."""
    needs: dict[int, str] = {}
    for item in filter(None, mark.split(", ")):
        match = _ITEM.fullmatch(item)
        if match is None or match["need"] not in NEEDS:
            raise ValueError(f"{name}: <!-- needs: {mark} -->: {item!r} is not one of {', '.join(NEEDS)}")
        numbers = set()
        for part in match["numbers"].split() or [f"1-{count}"]:
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
        if not numbers <= set(range(1, count + 1)):
            raise ValueError(f"{name}: <!-- needs: {mark} -->: the block has {count} commands")
        needs |= dict.fromkeys(numbers, match["need"])
    return needs


def all_commands() -> list[Command]:
    """Return the commands of all guides, each once per document; one in a block stands for the same one in the text."""
    unique: dict[tuple[str, str], Command] = {}
    for path in GUIDES:
        for command in commands(path):
            unique.setdefault((command.document, command.text), command)
    return list(unique.values())
