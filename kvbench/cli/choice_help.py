"""The text of ``python -m kvbench --help GROUP=CHOICE``: the options of a choice with defaults, types and comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench.cli.choice import Choice, Option, choice, decoding
from kvbench.cli.usage import group_text
from kvbench.util.confdir import groups

#: columns of the text
WIDTH = 100
#: what Python calls a value, and what one types
_WORDS = {"None": "null", "True": "true", "False": "false"}


def choice_help(words: Sequence[str], extra: Path | None = None) -> str | None:
    """Return the help for the choices that a command line names, such as ``method=kivi`` or ``method=kivi,atom``.

    The name of a group alone, such as ``method``, lists its choices; ``decoding``, a group without choices, has options
    of its own. Other overrides are skipped; the result is None if no override names a group or a choice.

    Raises:
        ConfigError: a group has no such choice.
    """
    known, parts = groups(), []
    for word in words:
        group, equals, names = word.partition("=")
        if group == "decoding" or group.startswith("decoding."):
            parts.append(_text(decoding()))
        elif group in known and not equals:
            parts.append(group_text(group, extra))
        elif group in known and not _free(group, names):
            parts += [_text(choice(group, name.strip(), extra)) for name in names.split(",")]
    return "\n".join(dict.fromkeys(parts)) or None


def plain(docstring: str) -> str:
    """Return a text of a docstring as one reads it on a terminal: without markup, and with values as one types them."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", docstring).replace("``", "").replace("`", "")
    return as_typed(text)


def as_typed(docstring: str) -> str:
    """Return a text of a docstring with values as one types them: null, true and false for None, True and False."""
    return re.sub(r"\b(None|True|False)\b", lambda match: _WORDS[match[0]], docstring)


def _free(group: str, name: str) -> bool:
    """Return True for models without a preset (``model=OWNER/NAME``, ``model=./FOLDER``)."""
    return group == "model" and "/" in name


def _text(chosen: Choice) -> str:
    title = f"{chosen.group}={chosen.name}" if chosen.name else chosen.group
    lines = [title, *textwrap.wrap(chosen.summary, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")]
    if chosen.target is not None:
        lines.append(f"  class: {chosen.target.__module__}.{chosen.target.__qualname__}")
    if chosen.takes:
        lines.append(f"  quantizers: {', '.join(chosen.takes)}")
    if chosen.sets:
        lines.append(f"  sets: {' '.join(chosen.sets)}")
    for option in chosen.options:
        lines += ["", *_option(option)]
    if not chosen.options:
        every = " Every method has method.rotation.key, method.rotation.value and method.layers."
        lines.append("  It has no options." + (every if chosen.group == "method" else ""))
    return "\n".join(lines) + "\n"


def _option(option: Option) -> Iterator[str]:
    head = f"  {option.key}={option.default}"
    comment = f"   # {option.comment}" if option.comment else ""
    if len(head + comment) <= WIDTH:
        yield head + comment
    else:
        yield head
        yield from textwrap.wrap(option.comment, WIDTH - 6, initial_indent="    # ", subsequent_indent="    # ")
    text = " ".join(part for part in (f"[{option.type}]" if option.type else "", plain(option.meaning)) if part)
    yield from textwrap.wrap(text, WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
