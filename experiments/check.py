"""``python -m experiments --check``: the numbers of README, docs and results, held to the files that they come from.

    python -m experiments --check               # 1 if a number differs from its file
    python -m experiments --check --write       # write the files' numbers into the documents
    python -m experiments --check --uncovered   # list the numbers of tables, and of text with a unit, without a rule

The rules are in :mod:`experiments.checks`. What a program writes is compared, and written, as it is; a number in a
sentence with the digits and signs that the document shows. Nothing is measured: raw figures are read from results/.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.checks import all_rules
from experiments.checks.rules import NUMBER, check_documents
from experiments.place import TRIALS
from experiments.stored import ROOT

#: tables that need no rule, and why: document, and the beginning of the table's head (empty: all tables)
EXEMPT = {
    ("docs/analysis.md", ""): "definitions of columns",
    ("docs/architecture.md", ""): "layers, states and files",
    ("docs/glossary.md", ""): "examples of words",
    ("docs/benchmarks.md", ""): "names of data sets",
    ("docs/concepts.md", ""): "words",
    ("docs/quickstart.md", ""): "words and links",
    ("docs/kernels.md", ""): "layouts in memory and limits of the code",
    ("docs/models.md", ""): "sizes, lengths and settings of models from their configurations",
    ("docs/report.md", "| view |"): "what the page shows",
    ("docs/running.md", ""): "settings and sizes of data sets",
    ("docs/methods.md", "| `method=` |"): "bit widths and years",
    ("results/mini/chunks.md", ""): "written by python -m experiments.mini.chunks, which keeps no other file",
    ("results/published/README.md", ""): "about the papers' numbers",
    ("results/smollm2/plan.md", ""): "written by python -m experiments.real --plan",
    ("results/smollm2/floors/table.md", ""): "written by python -m experiments.real floors",
    ("results/smollm2/README.md", ""): "figures of runs at the options of others, with their log",
}


def checked_documents(root: Path) -> list[str]:
    """Return the documents whose tables should have rules: README.md, docs and results."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "results").rglob("*.md"))]
    names = [path.relative_to(root) for path in paths]
    return [
        str(name) for name in names if name.parts[:2] not in {("results", name) for name in ("runs", "sweeps", TRIALS)}
    ]


#: what follows a number of running text that may be measured
UNIT = re.compile(r"\s*(µs|ms|s|%|±|x|nats|points|tokens/s|[GT]B/s|[kMG]i?B|per cent|times|minutes|hours)(?!\w)")
_CODE = re.compile(r"`[^`]*`")


def prose(covered: Mapping[str, set[int]], names: Sequence[str], root: Path = ROOT) -> list[tuple[str, int, str]]:
    """Return the numbers with a unit in running text that no rule covers: document, line, number. Code is left out."""
    missing = []
    for name in names:
        fenced, offset = False, 0
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(keepends=True), start=1):
            fenced ^= line.startswith("```")
            if not (fenced or line.startswith(("|", "    ", "<!--"))):
                shown = _CODE.sub(lambda match: "`" * len(match.group()), line)
                for match in NUMBER.finditer(shown):
                    if UNIT.match(shown, match.end()) and offset + match.start() not in covered.get(name, set()):
                        missing.append((name, number, match.group()))
            offset += len(line)
    return missing


def uncovered(covered: Mapping[str, set[int]], names: Sequence[str], root: Path = ROOT) -> list[tuple[str, int, str]]:
    """Return the numbers in cells of tables that no rule covers: document, line, number.

    Heads and first cells are left out.
    """
    missing = []
    for name in names:
        head = ""
        lines, offset = (root / name).read_text(encoding="utf-8").splitlines(keepends=True), 0
        for number, line in enumerate(lines):
            if line.startswith("|") and _ruled("".join(lines[number + 1 : number + 2])):
                head = line
            elif line.startswith("|") and not _ruled(line) and not _exempt(name, head):
                for match in NUMBER.finditer(line, line.find("|", 1)):
                    if offset + match.start() not in covered.get(name, set()):
                        missing.append((name, number + 1, match.group()))
            offset += len(line)
    return missing


def _exempt(name: str, head: str) -> bool:
    """Return True if a table needs no rule."""
    return any(name == document and head.startswith(start) for document, start in EXEMPT)


def _ruled(line: str) -> bool:
    """Return True if a line of a table is the rule below its head."""
    return line.startswith("|") and set(line.strip()) <= set("|-: ")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write or list, as the command line says; 1 if a number differs or a rule's place is gone."""
    parser = argparse.ArgumentParser(prog="python -m experiments --check", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the files' numbers into the documents")
    parser.add_argument("--uncovered", action="store_true", help="list the numbers that no rule covers")
    arguments = parser.parse_args(argv)
    outcome = check_documents(all_rules(), write=arguments.write)
    for difference in outcome.differences:
        print(f"{'written: ' if arguments.write else ''}{difference}")
    for place in outcome.lost:
        print(f"error: {place}", file=sys.stderr)
    if arguments.uncovered:
        for name, line, number in uncovered(outcome.covered, checked_documents(ROOT)):
            print(f"{name}:{line}: {number} has no rule")
        pages = [name for name in checked_documents(ROOT) if not name.startswith("results/")]
        for name, line, number in prose(outcome.covered, pages):
            print(f"{name}:{line}: {number}, in the text, has no rule")
        for (name, head), reason in EXEMPT.items():
            print(f"{name}{f', {head}' if head else ''}: no rules needed: {reason}")
    differ = f"{len(outcome.differences)} numbers {'written' if arguments.write else 'differ from their files'}"
    print(f"{len(outcome.covered)} documents, {differ}, {len(outcome.lost)} rules without a place")
    return 1 if outcome.lost or (outcome.differences and not arguments.write) else 0


if __name__ == "__main__":
    raise SystemExit(main())
