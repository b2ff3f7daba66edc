"""Texts of docstrings and of configurations as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from kvbench.cli.choice import Option, as_typed


def option_table(rows: Iterable[Option]) -> str:
    """Return a table of options: key, default, type, what it does, and the comment of the preset."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for option in rows:
        text = sentence(escaped_cell(docstring_markdown(as_typed(option.meaning)))) or sentence(
            escaped_cell(option.comment)
        )
        note = f"<br>*In the preset:* {escaped_cell(option.comment)}" if option.meaning and option.comment else ""
        kind = f"*{escaped_cell(option.type)}.* " if option.type else ""
        lines.append(f"| {code(option.key)} | {code(option.default)} | {kind}{text}{note} |")
    return "\n".join(lines) + "\n"


def class_markdown(cls: type) -> str:
    """Return the docstring of a class as Markdown, without its sections (Args, Raises and so on)."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return docstring_markdown(re.split(r"\n+(?:Args|Attributes|Raises|Returns):\n", text)[0])


def docstring_markdown(docstring: str) -> str:
    """Return a text of a docstring as Markdown: references to code become code."""
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")


def escaped_cell(text: str) -> str:
    """Return a text that can be in a cell of a table: on one line, markup escaped outside code, bars everywhere."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return a value as code in a cell."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter, unless it begins with code, and ends with a full stop."""
    text = text.strip()
    return text and text[:1].upper() + text[1:] + ("" if text[-1] in ".:!?" else ".")
