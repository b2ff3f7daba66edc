"""The pages of the site: README.md, docs/, every file of the repository that they link to, and generated pages."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.site import api, reference
from experiments.site.links import anchors, is_external, relative, resolved, rewritten, targets

ROOT = Path(__file__).resolve().parents[2]
#: languages of files that become pages with highlighted code, by ending
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".cff": "yaml", ".txt": "text"}
#: the style sheet, in docs/
STYLE = "site.css"
#: files without an ending that are text
TEXTS = ("LICENSE", "NOTICE", "Makefile")


@dataclass
class Tree:
    """All pages and files of the site.

    Args:
        pages: Markdown by path on the site.
        files: other files by path on the site, with their places in the repository.
        sources: for pages that are Markdown files of the repository, the paths of these files.
    """

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yield a line for each link that leads nowhere: to no page or file, or to no heading of its page."""
        headings: dict[str, set[str]] = {}
        for page, text in sorted(self.pages.items()):
            for target in targets(text):
                if is_external(target):
                    continue
                path, anchor = resolved(page, target)
                if path not in self.pages and path not in self.files:
                    yield f"{page}: {target}: no such page or file"
                elif anchor and path in self.pages:
                    headings.setdefault(path, anchors(self.pages[path]))
                    if anchor not in headings[path]:
                        yield f"{page}: {target}: no heading #{anchor} in {path}"

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
    """Return the tree of the site: hand-written pages, what they link to (and so on), generated pages and the API.

    Links are rewritten to the places that files have on the site.
    """
    tree = Tree()
    waiting = ["README.md", *sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md"))]
    while waiting:
        source = waiting.pop()
        if site_path(source) in tree.sources:
            continue
        tree.sources[site_path(source)] = source
        text = (root / source).read_text(encoding="utf-8")
        linked = {target: _linked(root, source, target) for target in targets(text) if not is_external(target)}
        waiting += [path for path in linked.values() if path.endswith(".md") and (root / path).is_file()]
        for path in linked.values():
            if not path.endswith(".md"):
                _add(tree, root, path)
        if not text.startswith("# "):
            text = f"# {source.removesuffix('.md')}\n\n{text}"
        tree.pages[site_path(source)] = rewritten(text, _Mover(site_path(source), linked))
    tree.files[STYLE] = root / "docs" / STYLE
    tree.pages |= reference.pages()
    tree.pages |= api.pages()
    tree.pages |= _results(tree)
    return tree


def _linked(root: Path, source: str, target: str) -> str:
    """Return the path in the repository that a link leads to; for a folder with a README.md, that of the latter."""
    path, _ = resolved(source, target)
    return f"{path}/README.md" if (root / path / "README.md").is_file() else path


@dataclass(frozen=True)
class _Mover:
    """Function from a link in the repository to the same link on the site."""

    page: str
    linked: Mapping[str, str]

    def __call__(self, target: str) -> str:
        if target not in self.linked:
            return target
        anchor = target.partition("#")[2]
        if target.startswith("#"):
            return target
        return relative(self.page, _place(self.linked[target]), anchor)


def _place(source: str) -> str:
    """Return the site path of a linked file: code has a page of its own, and so has a folder."""
    if source.endswith(".md"):
        return site_path(source)
    ending = posixpath.splitext(source)[1]
    if source == "results":
        return "results/index.md"
    if ending in LANGUAGES or source in TEXTS:
        return f"files/{source}.md"
    return site_path(source) if ending else f"files/{source}/index.md"


def _add(tree: Tree, root: Path, source: str) -> None:
    """Add a linked file or folder of the repository, if it exists."""
    path, place = root / source, _place(source)
    if path.is_dir():
        if source != "results":
            names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name[0] not in "._")
            listing = "\n".join(f"- `{name}`" for name in names)
            tree.pages[place] = f"# `{source}/`\n\nA folder of the repository, with\n\n{listing}\n"
    elif path.is_file() and place.endswith(".md"):
        language = LANGUAGES.get(path.suffix, "text")
        tree.pages[place] = f"# `{source}`\n\n````{language}\n{path.read_text(encoding='utf-8')}````\n"
    elif path.is_file():
        tree.files[place] = path


def _results(tree: Tree) -> dict[str, str]:
    """Return the page that lists all pages about results."""
    lines = ["# Results", "", "What was measured, with the machine, the commit and the command of each figure.", ""]
    for page, name in titles(tree.pages, "results/").items():
        lines.append(f"- [{name}]({relative('results/index.md', page)})")
    return {"results/index.md": "\n".join(lines) + "\n"}


def titles(pages: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the titles of the pages in a folder, by path; one that occurs twice is followed by its page's folder."""
    names = {page: _title(text) for page, text in sorted(pages.items()) if page.startswith(folder)}
    counts = Counter(names.values())
    return {
        page: name if counts[name] == 1 else f"{name} ({posixpath.dirname(page).rpartition('/')[2]})"
        for page, name in names.items()
    }


def _title(text: str) -> str:
    """Return the title of a page: its first heading, without markup."""
    for line in text.splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ").replace("`", "").strip()
    return "Untitled"
