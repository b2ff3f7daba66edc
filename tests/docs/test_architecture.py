"""docs/architecture.md against the tree: paths exist, and what its table says a file decides is defined there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from kvbench.runner.modules import load, package_files

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: what a reader replaces, and what stands for several names
PLACEHOLDER = re.compile(r"<\w+>")
PATH = re.compile(r"[\w.<>*/-]+/|(?:[\w.<>*-]+/)*[\w.<>*-]+\.(?:py|js|yml|yaml|toml|md)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def rows(title: str) -> list[list[str]]:
    """The cells of each row of the table below a heading."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def marked(text: str) -> Iterator[tuple[str, str]]:
    """What stands in backticks, in order, each with the text between it and the one before."""
    parts = text.split("`")
    return zip(parts[::2], parts[1::2], strict=False)


def resolved(text: str) -> list[tuple[str, str, list[Path]]]:
    """Each path in backticks with the text before it and its files.

    A path may be relative to the folder of the last one that is whole.
    """
    found: list[tuple[str, str, list[Path]]] = []
    folder = ROOT
    for before, token in marked(text):
        if not PATH.fullmatch(token):
            continue
        pattern = PLACEHOLDER.sub("*", token).rstrip("/")
        if files := list(ROOT.glob(pattern)):
            folder = files[0] if files[0].is_dir() else files[0].parent
        found.append((before, token, files or list(folder.glob(pattern))))
    return found


def missing_paths(text: str) -> list[str]:
    return [f"no such path: {token}" for _, token, files in resolved(text) if not files]


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a file defines: functions, classes, variables, and members as ``Class.member`` and alone."""
    names: set[str] = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            own, inner = [], owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = [child.name]
                inner = child.name if isinstance(child, ast.ClassDef) else owner
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                own = [target.id for target in targets if isinstance(target, ast.Name)]
                own += [
                    target.attr
                    for target in targets
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                ]
            names.update(own, (f"{owner}.{name}" for name in own if owner))
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return frozenset(names)


def defines(places: list[Path], name: str) -> bool:
    """Whether a Python file, or one in a folder, defines a name."""
    last = name.rpartition(".")[2]
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    return any(name in defined(file) for file in files if file.suffix == ".py" and last in file.read_text("utf-8"))


def missing_names(cell: str) -> list[str]:
    """The names in a cell that are not defined where it says.

    That is in the next path, if the word before it is "in" (`` `pick` in `fused.py` ``), else in the path before
    (`` `fused.py` (`pick`) ``).
    """
    missing, last, waiting = [], None, []
    paths = iter(resolved(cell))
    for before, token in marked(cell):
        if not PATH.fullmatch(token):
            waiting.append(token)
            continue
        _, _, files = next(paths)
        if before.endswith(" in "):
            missing += [f"{name} is not defined in {token}" for name in waiting if not defines(files, name)]
        else:
            missing += _undefined(waiting, last)
        waiting, last = [], (token, files)
    return missing + _undefined(waiting, last)


def _undefined(names: list[str], place: tuple[str, list[Path]] | None) -> list[str]:
    if place is None:
        return [f"{name}: no file is named for it" for name in names]
    return [f"{name} is not defined in {place[0]}" for name in names if not defines(place[1], name)]


DECIDED = rows("Where is it decided?")


@pytest.mark.parametrize(("question", "answer"), DECIDED, ids=[question for question, _ in DECIDED])
def test_what_decides_is_there(question: str, answer: str) -> None:
    wrong = missing_paths(answer) + missing_names(answer)
    assert not wrong, f"docs/architecture.md, Where is it decided?, '{question}': {'; '.join(wrong)}"


@pytest.mark.parametrize("title", re.findall(r"^## (.*)$", TEXT, re.MULTILINE))
def test_paths_of_every_section_exist(title: str) -> None:
    """Row by row, or line by line where paths are relative to one in an earlier cell or sentence."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    tables = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    prose = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
    wrong = [f"{piece[:60]}...: {text}" for piece in [*tables.splitlines(), prose] for text in missing_paths(piece)]
    assert not wrong, f"docs/architecture.md, {title}: {wrong}"


@pytest.mark.parametrize("title", re.findall(r"^## (.*)$", TEXT, re.MULTILINE))
def test_no_row_is_there_twice(title: str) -> None:
    first = [cells[0] or cells[1] for cells in rows(title) if not cells[0].isdigit()]
    assert len(first) == len(set(first)), [cell for cell in first if first.count(cell) > 1]


def test_members_that_the_page_names_exist() -> None:
    """`Class.member`, wherever the page says it: a class of that name in kvbench, or a base of it, has the member."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "kvbench").rglob("*.py")}

    def has(cls: str, member: str) -> bool:
        for path, text in ((path, text) for path, text in sources.items() if f"class {cls}" in text):
            for head in re.finditer(rf"^class {cls}\b(.*):$", text, re.MULTILINE):
                if f"{cls}.{member}" in defined(path) or any(has(base, member) for base in NAME.findall(head[1])):
                    return True
        return False

    said = {token for _, token in marked(TEXT) if re.fullmatch(r"[A-Z]\w*\.[a-z]\w*", token)}
    assert len(said) > 5
    wrong = [token for token in sorted(said) if not has(*token.split("."))]
    assert not wrong, f"docs/architecture.md names what kvbench does not define: {wrong}"


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """The modules among `files` that each of them imports, inside its functions too; what is for types alone is not."""
    graph = {}
    for name, path in files.items():
        module = load(name, path)
        targets = () if module is None else module.imports
        graph[name] = {one if one in files else one.rpartition(".")[0] for one in targets} & files.keys() - {name}
    return graph


def test_modules_import_in_no_circle(tmp_path: Path) -> None:
    graph = imports({**package_files("kvbench"), **package_files("experiments")})
    assert len(graph) > 500 and graph["experiments.check"] > {"experiments.checks", "experiments.checks.rules"}
    TopologicalSorter(graph).prepare()  # an error lists the circle
    (tmp_path / "first.py").write_text("from second import value\n")
    (tmp_path / "second.py").write_text("def value():\n    import first\n")
    with pytest.raises(CycleError):
        TopologicalSorter(imports({name: tmp_path / f"{name}.py" for name in ("first", "second")})).prepare()


def test_what_is_missing_is_said() -> None:
    """A row with a wrong file, function, member and place."""
    assert missing_paths("`kvbench/attention/fused.py`, `nothing.py`, `kvbench/away/`") == [
        "no such path: nothing.py",
        "no such path: kvbench/away/",
    ]
    assert missing_names("`kvbench/attention/fused.py` (`pick`, `pack`)") == [
        "pack is not defined in kvbench/attention/fused.py"
    ]
    assert missing_names("`KVLayer.update` → `KVLayer.unsettle` in `kvbench/cache/layer.py`") == [
        "KVLayer.unsettle is not defined in kvbench/cache/layer.py"
    ]
    assert missing_names("`pick` in `kvbench/cache/layer.py`, `kvbench/attention/fused.py`") == [
        "pick is not defined in kvbench/cache/layer.py"
    ]
    assert missing_names("`pick` of the fused path") == ["pick: no file is named for it"]
