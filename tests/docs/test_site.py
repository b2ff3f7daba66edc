"""The documentation's site: every page is in the navigation, every link leads somewhere, and it builds strictly."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments import stored
from experiments.site import api, navigation
from experiments.site.__main__ import stage
from experiments.site.links import anchors, relative, resolved, rewritten, targets
from experiments.site.method_page import kernels, limits, page
from experiments.site.reference import described, sentence, table
from experiments.site.tree import Tree, collect, site_path
from kvbench.cli.choice import choice
from kvbench.methods.load import load_method
from kvbench.util.confdir import options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return collect()


def test_every_page_is_in_the_navigation(tree: Tree) -> None:
    nav = navigation.complete(navigation.read()["nav"], tree)
    assert list(navigation.problems(nav, tree)) == []
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").as_posix() in tree.pages


def test_every_link_and_anchor_leads_somewhere(tree: Tree) -> None:
    assert list(tree.problems()) == []
    assert len(tree.pages) > 80


def test_mistakes_are_found() -> None:
    tree = Tree({"a.md": "# A\n[b](b.md#there) [c](c.md) [d](#a) `[e](e.md)`\n", "b.md": "# B\n"})
    assert list(tree.problems()) == ["a.md: b.md#there: no heading #there in b.md", "a.md: c.md: no such page or file"]
    nav = [{"A": "a.md"}, {"Again": "a.md"}, {"Gone": "gone.md"}]
    assert list(navigation.problems(nav, tree)) == [
        "mkdocs.yml: a.md is in the navigation more than once",
        "mkdocs.yml: gone.md does not exist",
        "b.md is not in the navigation: add b.md to nav in mkdocs.yml",
    ]


def test_folders_of_the_navigation_become_their_pages() -> None:
    tree = Tree({"x/b.md": "# Two\n", "x/a.md": "# `one`\n", "y.md": "# Y\n"})
    nav = navigation.complete([{"All": [{"X": "x/"}, {"Y": "y.md"}]}], tree)
    assert nav == [{"All": [{"X": [{"one": "x/a.md"}, {"Two": "x/b.md"}]}, {"Y": "y.md"}]}]
    assert list(navigation.listed(nav)) == ["x/a.md", "x/b.md", "y.md"]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("README.md", "index.md"),
        ("docs/speed.md", "speed.md"),
        ("CONTRIBUTING.md", "contributing.md"),
        ("results/mini/README.md", "results/mini/index.md"),
        ("results/mini/plot.png", "results/mini/plot.png"),
    ],
)
def test_places_on_the_site(source: str, place: str) -> None:
    assert site_path(source) == place


def test_links_are_rewritten_outside_code() -> None:
    text = "[a](x.md) `[b](x.md)` ![c](y.png)\n\n```\n[d](x.md)\n```\n"
    assert list(targets(text)) == ["x.md", "y.png"]
    assert rewritten(text, str.upper) == text.replace("[a](x.md)", "[a](X.MD)").replace("y.png", "Y.PNG")
    assert resolved("a/b.md", "../c.md#d") == ("c.md", "d") and resolved("a/b.md", "#d") == ("a/b.md", "d")
    assert relative("a/b.md", "c.md", "d") == "../c.md#d"
    assert anchors("# One *two*\n## What `a_b` is?\n```\n# no\n```\n") == {"one-two", "what-a_b-is"}


@pytest.mark.parametrize("name", list(options("method")))
def test_pages_of_methods(name: str) -> None:
    """A page has the source, every option and the bytes that the formula gives."""
    chosen = choice("method", name)
    text = page(chosen, table)
    assert all(f"`{option.key}`" in text for option in chosen.options)
    assert "**Source.**" in text or name in ("fp16", "hf_quantized")
    assert "| Llama-2-7B | " in text and "def layer_bytes" in text
    assert limits(load_method(name))
    assert "Args:" not in text and ":class:" not in text


def test_bytes_of_a_page_are_those_of_the_formula() -> None:
    text = page(choice("method", "fp16"), table)
    assert "| Llama-2-7B | 2,048 (100 %) | 16,384 (100 %) | 65,536 (100 %) |" in text
    assert "| Llama-3.1-8B | 512 (100 %) |" in text


def test_kernels_of_a_page_are_those_that_were_measured() -> None:
    """Against the paths of decode steps in results/h200."""
    paths: dict[str, set[str]] = {}
    for file in ("whole/tpot.json", "peaks/random.json", "h2o/tpot.json"):
        for row in stored.content(ROOT / "results" / "h200" / file)["rows"]:
            paths.setdefault(row["setting"].partition(":")[0], set()).add(row["path"])
    assert len(paths) > 6
    for name, measured in paths.items():
        text = kernels(load_method(name))
        assert "cuda" not in measured or "CUDA kernel" in text, name
        assert measured != {"triton"} or "Triton kernel" in text, name


def test_texts_of_docstrings() -> None:
    assert sentence("a thing") == "A thing." and sentence("`x`: y.") == "`x`: y." and sentence("") == ""
    assert described(type("A", (), {"__doc__": "Say ``x`` of :class:`~a.B`.\n\n    Args:\n        y: z.\n    "})) == (
        "Say `x` of `B`."
    )


def test_objects_of_the_api_exist() -> None:
    """Without importing them: the module's file has a definition of that name."""
    for shown in api.PAGES.values():
        for name in shown.objects:
            parts = name.split(".")
            path = ROOT.joinpath(*parts)
            if path.with_suffix(".py").is_file() or path.is_dir():
                continue
            text = ROOT.joinpath(*parts[:-1]).with_suffix(".py").read_text(encoding="utf-8")
            assert f"\nclass {parts[-1]}" in text or f"\ndef {parts[-1]}(" in text, name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zensical") is None, reason="needs Zensical: pip install 'kvbench[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """About 30 seconds: two builds, the second of a page with a link that leads nowhere."""
    config = stage(tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("index", "faq", "reference/method/cocktail", "api/library", "results/index"):
        assert (tmp_path / "site" / f"{name}.html").is_file()
    library = (tmp_path / "site" / "api" / "library.html").read_text(encoding="utf-8")
    assert 'id="kvbench.methods.load.load_method"' in library and "a path to a YAML file" in library
    html = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in html  # no page asks another server for anything
    with (tmp_path / "pages" / "index.md").open("a", encoding="utf-8") as file:
        file.write("\n[nowhere](nowhere.md)\n")
    assert subprocess.run(command, capture_output=True).returncode != 0
