"""The pages of the site: README.md, docs/, every file of the repository that they link to, and generated pages."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.site import reference

ROOT = Path(__file__).resolve().parents[2]
#: languages of files that become pages with highlighted code, by ending
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".cff": "yaml", ".txt": "text"}
#: files without an ending that are text
TEXTS = ("LICENSE", "NOTICE", "Makefile")
#: a code block, code in backquotes, or the target of a link or picture
LINK = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|`[^`\n]+`|(?<=\]\()(?P<target>[^)\s]+)(?=\))", re.MULTILINE | re.DOTALL
)
Nav = list[dict[str, Any]]


@dataclass
class Tree:
    """All pages and files of the site.

    Args:
        pages: Markdown by path on the site.
        files: other files by path on the site, with their places in the repository.
        sources: for pages that are Markdown files of the repository, the paths of these files.
        root: the repository.
        waiting: Markdown files of the repository that are still to be added.
    """

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    root: Path = ROOT
    waiting: list[str] = field(default_factory=list)

    def add(self, source: str) -> None:
        """Add a Markdown file of the repository, its links rewritten to places on the site."""
        page = site_path(source)
        if page in self.sources:
            return
        self.sources[page] = source
        text = (self.root / source).read_text(encoding="utf-8")
        if not text.startswith("# "):
            text = f"# {source.removesuffix('.md')}\n\n{text}"

        def moved(match: re.Match[str]) -> str:
            target = match["target"]
            if target is None or target.startswith(("#", "mailto:")) or "://" in target:
                return match[0]
            name, hash_, anchor = target.partition("#")
            place = self.linked(posixpath.normpath(posixpath.join(posixpath.dirname(source), name)))
            return posixpath.relpath(place, posixpath.dirname(page) or ".") + hash_ + anchor

        self.pages[page] = LINK.sub(moved, text)

    def linked(self, source: str) -> str:
        """Add a file or folder to which a page links, if it exists; return its place on the site.

        Code has a page of its own, and so has a folder: its README.md, or the list of its files.
        """
        path, ending = self.root / source, posixpath.splitext(source)[1]
        if (path / "README.md").is_file():
            source, ending = f"{source}/README.md", ".md"
        if ending == ".md":
            self.waiting += [source] if (self.root / source).is_file() else []
            return site_path(source)
        if source == "results":
            return "results/index.md"
        if ending in LANGUAGES or source in TEXTS:
            place, language = f"files/{source}.md", LANGUAGES.get(ending, "text")
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                self.pages[place] = f"# `{source}`\n\n````{language}\n{text}````\n"
            return place
        if ending:
            self.files |= {site_path(source): path} if path.is_file() else {}
            return site_path(source)
        if path.is_dir():
            names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name[0] not in "._")
            listing = "\n".join(f"- `{name}`" for name in names)
            self.pages[f"files/{source}/index.md"] = f"# `{source}/`\n\nA folder of the repository, with\n\n{listing}\n"
        return f"files/{source}/index.md"

    def titles(self, folder: str) -> dict[str, str]:
        """Return the titles of a folder's pages by path; one that occurs twice is followed by its page's folder."""
        pages = sorted((page, text) for page, text in self.pages.items() if page.startswith(folder))
        names = {page: text.splitlines()[0].removeprefix("# ").replace("`", "").strip() for page, text in pages}
        counts = Counter(names.values())
        return {
            page: name if counts[name] == 1 else f"{name} ({posixpath.dirname(page).rpartition('/')[2]})"
            for page, name in names.items()
        }

    def navigation(self, nav: Nav) -> Nav:
        """Return mkdocs.yml's navigation with every folder (``reference/method/``) replaced by its pages."""
        return [{name: self._expanded(value) for name, value in entry.items()} for entry in nav]

    def _expanded(self, value: Any) -> Any:
        if isinstance(value, list):
            return self.navigation(value)
        return [{name: page} for page, name in self.titles(value).items()] if value.endswith("/") else value

    def problems(self, nav: Nav) -> Iterator[str]:
        """Yield a line for each page of a navigation that does not exist, and each page that is not in it once.

        Pages that show a file of the repository (``files/``) are only linked.
        """
        listed = Counter(navigation_pages(self.navigation(nav)))
        for page, count in sorted(listed.items()):
            if count > 1:
                yield f"mkdocs.yml: {page} is in the navigation more than once"
            if page not in self.pages:
                yield f"mkdocs.yml: {page} does not exist"
        for page in sorted(self.pages):
            if page not in listed and not page.startswith("files/"):
                yield f"{self.sources.get(page, page)} is not in the navigation: add {page} to nav in mkdocs.yml"

    def write(self, folder: Path) -> None:
        """Write all pages and files into a folder; what has not changed is left alone, anything else is removed."""
        contents = {path: text.encode() for path, text in self.pages.items()}
        contents |= {path: source.read_bytes() for path, source in self.files.items()}
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if path.relative_to(folder).as_posix() not in contents:
                path.unlink()
        for name, content in contents.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def navigation_pages(nav: Nav) -> Iterator[str]:
    """Yield all pages of a navigation without folders."""
    for entry in nav:
        for value in entry.values():
            yield from navigation_pages(value) if isinstance(value, list) else [value]


def site_path(source: str) -> str:
    """Return where a file of the repository is on the site.

    Pages of docs/ are at the top, and so is README.md, as the first page. A README.md elsewhere is its folder's page.
    """
    if source.startswith("docs/"):
        source = source.removeprefix("docs/")
    elif source == "README.md":
        return "index.md"
    elif "/" not in source and source.endswith(".md"):
        return source.lower()
    folder, name = posixpath.split(source)
    return posixpath.join(folder, "index.md") if name == "README.md" else source


def collect(root: Path = ROOT) -> Tree:
    """Return the tree of the site: hand-written pages, what they link to (and so on), and generated pages."""
    documents = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    tree = Tree(root=root, waiting=[path.relative_to(root).as_posix() for path in documents])
    while tree.waiting:
        tree.add(tree.waiting.pop())
    tree.files["site.css"] = root / "docs" / "site.css"
    tree.pages |= reference.generated_pages()
    lines = ["# Results", "", "What was measured, with the machine, the commit and the command of each figure.", ""]
    for page, name in tree.titles("results/").items():
        lines.append(f"- [{name}]({page.removeprefix('results/')})")
    tree.pages["results/index.md"] = "\n".join(lines) + "\n"
    return tree
