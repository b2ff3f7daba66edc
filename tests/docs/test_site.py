"""The documentation's site: every page is in the navigation, every link leads somewhere, and it builds strictly."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from experiments import stored
from experiments.site.__main__ import CONFIG, stage
from experiments.site.reference import class_markdown, kernels, limits, method_page, sentence
from experiments.site.tree import LINK, Tree, collect, navigation_pages, site_path
from kvbench.cli.choice import choice
from kvbench.methods.load import load_method
from kvbench.util.confdir import group_options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return collect()


def test_every_page_is_in_the_navigation(tree: Tree) -> None:
    assert list(tree.problems(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])) == []
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").as_posix() in tree.pages


def targets(text: str) -> list[str]:
    return [match["target"] for match in LINK.finditer(text) if match["target"]]


def test_every_link_leads_somewhere(tree: Tree) -> None:
    """Anchors are checked in the repository's files (test_docs.py), and in all pages by Zensical."""
    links = [(name, target) for name, text in tree.pages.items() for target in targets(text) if "://" not in target]
    assert len(tree.pages) > 80 and len(links) > 400
    for name, target in links:
        path = target.partition("#")[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        assert place in tree.pages or place in tree.files, f"{name}: {target}"


def test_mistakes_are_found() -> None:
    tree = Tree({"a.md": "# A\n", "b.md": "# B\n"}, sources={"b.md": "docs/b.md"})
    assert list(tree.problems([{"A": "a.md"}, {"Again": "a.md"}, {"Gone": "gone.md"}])) == [
        "mkdocs.yml: a.md is in the navigation more than once",
        "mkdocs.yml: gone.md does not exist",
        "docs/b.md is not in the navigation: add b.md to nav in mkdocs.yml",
    ]


def test_folders_of_the_navigation_become_their_pages() -> None:
    tree = Tree({"x/b.md": "# Two\n", "x/a.md": "# `one`\n", "y.md": "# Y\n", "z/c/d.md": "# Z\n", "z/e.md": "# Z\n"})
    nav = tree.navigation([{"All": [{"X": "x/"}, {"Y": "y.md"}]}, {"Z": "z/"}])
    assert nav == [
        {"All": [{"X": [{"one": "x/a.md"}, {"Two": "x/b.md"}]}, {"Y": "y.md"}]},
        {"Z": [{"Z (c)": "z/c/d.md"}, {"Z (z)": "z/e.md"}]},
    ]
    assert list(navigation_pages(nav)) == ["x/a.md", "x/b.md", "y.md", "z/c/d.md", "z/e.md"]


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


def test_links_lead_to_places_on_the_site_but_not_in_code(tmp_path: Path) -> None:
    text = "# A\n[a](../b.md#x) `[b](../b.md)` ![c](y.png) [d](#a) [e](https://e.org) [f](../src/g.py) [h](../src)\n"
    fenced = "\n```\n[d](../b.md)\n```\n"
    for name, content in {"docs/a.md": text + fenced, "b.md": "B\n", "docs/y.png": "", "src/g.py": "x = 1\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    tree = Tree(root=tmp_path)
    tree.add("docs/a.md")
    shown = text.replace("[a](../b.md", "[a](b.md").replace("../src/g.py", "files/src/g.py.md")
    assert tree.pages == {
        "a.md": shown.replace("../src)", "files/src/index.md)") + fenced,
        "files/src/g.py.md": "# `src/g.py`\n\n````python\nx = 1\n````\n",
        "files/src/index.md": "# `src/`\n\nA folder of the repository, with\n\n- `g.py`\n",
    }
    assert tree.waiting == ["b.md"] and tree.files == {"y.png": tmp_path / "docs/y.png"}
    tree.add("b.md")
    assert tree.pages["b.md"] == "# b\n\nB\n" and tree.sources == {"a.md": "docs/a.md", "b.md": "b.md"}


@pytest.mark.parametrize("name", list(group_options("method")))
def test_pages_of_methods(name: str) -> None:
    """A page has the source, every option and the bytes that the formula gives."""
    chosen = choice("method", name)
    text = method_page(chosen)
    assert all(f"`{option.key}`" in text for option in chosen.options)
    assert ("**Source.**" in text) is ("Source:" in str(sys.modules[type(load_method(name)).__module__].__doc__))
    assert "| Llama-2-7B | " in text and "def layer_bytes" in text
    assert limits(load_method(name))
    assert "Args:" not in text and ":class:" not in text


def test_bytes_of_a_page_are_those_of_the_formula() -> None:
    text = method_page(choice("method", "fp16"))
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
    assert class_markdown(
        type("A", (), {"__doc__": "Say ``x`` of :class:`~a.B`.\n\n    Args:\n        y: z.\n    "})
    ) == ("Say `x` of `B`.")


def test_objects_of_the_api_exist() -> None:
    """Without importing them: the module's file has a definition of that name."""
    for shown in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", shown.read_text(encoding="utf-8"), re.MULTILINE):
            parts = name.split(".")
            path = ROOT.joinpath(*parts)
            if path.with_suffix(".py").is_file() or path.is_dir():
                continue
            text = ROOT.joinpath(*parts[:-1]).with_suffix(".py").read_text(encoding="utf-8")
            assert f"\nclass {parts[-1]}" in text or f"\ndef {parts[-1]}(" in text, name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zensical") is None, reason="needs Zensical: pip install 'kvbench[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """About 45 seconds: three builds, two of a page with a link that leads nowhere."""
    config = stage(tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("index", "faq", "reference/method/cocktail", "api/library", "results/index"):
        assert (tmp_path / "site" / f"{name}.html").is_file()
    library = (tmp_path / "site" / "api" / "library.html").read_text(encoding="utf-8")
    assert 'id="kvbench.methods.load.load_method"' in library and "a path to a YAML file" in library
    html = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in html  # no page asks another server for anything
    index = tmp_path / "pages" / "index.md"
    text = index.read_text(encoding="utf-8")
    for target, wrong in (("nowhere.md", "page does not exist"), ("faq.md#nowhere", "anchor does not exist")):
        index.write_text(f"{text}\n[nowhere]({target})\n", encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode != 0 and wrong in done.stdout + done.stderr, target
