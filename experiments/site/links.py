"""Links of Markdown pages: where they are, what they lead to, and the anchors of headings."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

#: fenced blocks and code in backquotes, in which nothing is a link
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.*?)\s*$", re.MULTILINE)


def is_external(target: str) -> bool:
    """Return True for an address outside the repository."""
    return "://" in target or target.startswith("mailto:")


def targets(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures, such as ``speed.md#whole-models``."""
    for match in _LINK.finditer(_blank(text)):
        yield match["target"]


def rewritten(text: str, new: Callable[[str], str]) -> str:
    """Return a page with every link target replaced by ``new(target)``."""
    parts, end = [], 0
    for match in _LINK.finditer(_blank(text)):
        parts += [text[end : match.start()], new(match["target"])]
        end = match.end()
    return "".join([*parts, text[end:]])


def resolved(page: str, target: str) -> tuple[str, str]:
    """Return the path that a link leads to, seen from the root of all pages, and its anchor (empty if it has none).

    Args:
        page: path of the page with the link.
        target: target of the link; only an anchor leads to the page itself.
    """
    name, _, anchor = target.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page), anchor


def relative(page: str, path: str, anchor: str = "") -> str:
    """Return the link target that leads from a page to another path."""
    name = posixpath.relpath(path, posixpath.dirname(page) or ".")
    return f"{name}#{anchor}" if anchor else name


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them; a repeated title gets a number."""
    seen: dict[str, int] = {}
    names = set()
    for match in _HEADING.finditer(_blank(text, backquotes=False)):
        slug = re.sub(r"[^\w\- ]", "", match["title"].lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        names.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
    return names | set(re.findall(r"\bid=\"([^\"]+)\"", text))


def _blank(text: str, backquotes: bool = True) -> str:
    """Return `text` with code replaced by spaces, so that offsets stay."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0]) if backquotes or match["fence"] else match[0]

    return _CODE.sub(spaces, text)
