"""Documents against the tree: links lead somewhere, and paths exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.commands import GUIDES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "results").rglob("*.md"),
        *(ROOT / "kvbench").rglob("*.md"),
    ]
)
#: a path that a reader replaces
PLACEHOLDER = re.compile(r"\b(?:foo|NAME|FILES|RUN|DIR|N)\b|[<>|]")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{ids(path)}: {target}"
        assert not anchor or anchor in anchors(place), f"{ids(path)}: no heading #{anchor} in {name or ids(path)}"


#: folders that commands make
MADE = ("results/runs", "results/sweeps", "results/trials", "results/lm_eval")


@pytest.mark.parametrize("path", GUIDES, ids=ids)
def test_paths_that_are_named_exist(path: Path) -> None:
    """Return the paths in backquotes that begin with one of the tree's folders."""
    for name in re.findall(
        r"`((?:kvbench|conf|tests|experiments|examples|docs|results|\.ci|\.github)/[^`\s]*)`", text(path)
    ):
        name = name.partition("::")[0].partition("#")[0]
        if PLACEHOLDER.search(name) or name.startswith(MADE):
            continue
        assert list(ROOT.glob(name.rstrip("/"))), f"{ids(path)}: {name}"


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_package_is_on_the_map() -> None:
    """docs/architecture.md has a line for each package and door of kvbench."""
    shown = text(ROOT / "docs" / "architecture.md")
    for path in (ROOT / "kvbench").iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"`kvbench/{path.name}/`" in shown, path.name
        elif path.suffix == ".py" and not path.name.startswith("__"):
            assert path.name in shown, path.name


def test_the_map_has_the_layers_that_imports_are_held_to() -> None:
    """The numbers of docs/architecture.md against the contract of import-linter, floor by floor."""
    project = tomllib.loads(text(ROOT / "pyproject.toml"))
    (rooms,) = (c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    expected = [{name.strip() for name in layer.split("|")} for layer in reversed(rooms["layers"])]
    shown: dict[int, set[str]] = {}
    number = 0
    table = text(ROOT / "docs" / "architecture.md").partition("## Packages")[2].partition("## ")[0]
    for digits, names in re.findall(r"^\| (\d*) ?\| (`.*?) \|", table, re.MULTILINE):
        number = int(digits or number)
        shown.setdefault(number, set()).update(re.findall(r"`(?:kvbench/)?(\w+)(?:/|\.py)`", names))
    assert [shown[floor] for floor in sorted(shown)] == expected


def test_the_readme_is_two_screens() -> None:
    shown = re.sub(r"<!-- needs: .* -->\n\n", "", text(ROOT / "README.md"))  # marks are for tests, and not shown
    lines = shown.splitlines()
    assert len(lines) <= 144  # with two tables of results
    assert max(len(line) for line in lines if not line.startswith(("|", "<!--"))) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=ids)
def test_files_for_the_server_are_yaml(path: Path) -> None:
    content = yaml.safe_load(text(path))
    assert content["name"]


def test_the_workflow_does_what_a_machine_does() -> None:
    workflow = yaml.safe_load(text(ROOT / ".github" / "workflows" / "ci.yml"))
    assert {"run": ".ci/run"}.items() <= workflow["jobs"]["test"]["steps"][-1].items()


def test_the_citation_names_the_version() -> None:
    import kvbench

    citation = yaml.safe_load(text(ROOT / "CITATION.cff"))
    assert citation["authors"] == [{"name": "The kvbench developers"}]
    assert citation["version"] == kvbench.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_page_of_kernels_draws_what_the_code_does() -> None:
    """Launches stand in the files that are named; words, and KIVI's phases, are as drawn."""
    from kvbench.attention.phases import pairs_of_row
    from kvbench.cache.segments.layout import TileLayout

    page = text(ROOT / "docs" / "kernels.md")
    table = page.partition("## Launches")[2].partition("## ")[0]
    launches = re.findall(r"^\| ((?:`\w+`(?: \(\w+\))?(?:, )?)+) \|.*\| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(launches) >= 18
    for names, file in launches:
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(?:def|void\b.*) {name}\(", text(ROOT / file)), f"{name} in {file}"
    for width, fields, rows in ((4, 4, 32), (2, 8, 16)):
        assert (TileLayout(width, "key").fields, TileLayout(width, "key").rows) == (fields, rows)
        assert f"int{width}: F = {fields} fields, N = {rows} word rows" in page
    assert "slots   0 ............ 172 ............. 256 ......... 300" in page
    assert pairs_of_row([256, 44], [172, 128]) == {(0, 0): (0, 0, 172), (0, 1): (172, 0, 84), (1, 1): (0, 84, 44)}
