"""Pages about the choices of the configuration, made from conf/, the dataclasses and their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

from experiments.site import method_page, model_page
from kvbench.cli.choice import Choice, Option, choice, decoding
from kvbench.cli.choice_help import as_typed
from kvbench.util.confdir import options

#: titles and first sentences of the pages that show all choices of a group
GROUPS = {
    "quantizer": (
        "Quantizers",
        "A quantizer is the packed format of keys and values. Each method has a default, and lists those it accepts.",
    ),
    "dataset": (
        "Data sets",
        "Data sets of one class have the same options; the table shows the defaults of the first of them. "
        "`python -m kvbench --help dataset=NAME` shows those of each.",
    ),
    "runtime": (
        "Runtime",
        "These options say how a run is executed. Only `runtime.seed` is part of the run's id.",
    ),
    "logger": ("Loggers", "A logger receives a row for each finished run; `results/runs` has everything all the same."),
    "launcher": ("Launchers", "A launcher runs the jobs of a sweep."),
    "experiment": ("Presets of runs", "A preset sets several groups at once: `python -m kvbench experiment=NAME`."),
}


def pages() -> dict[str, str]:
    """Return the generated pages by path on the site."""
    texts = {
        f"reference/method/{name}.md": method_page.page(choice("method", name), table) for name in options("method")
    }
    texts["reference/models.md"] = model_page.page(table)
    for group, (title, intro) in GROUPS.items():
        texts[f"reference/{group}.md"] = _group(group, title, intro)
    texts["reference/decoding.md"] = (
        "# Decoding\n\nThese options say how answers are generated. All of them are part of the run's id.\n\n"
        + table(decoding().options)
    )
    return texts


def _group(group: str, title: str, intro: str) -> str:
    """Return the page of a group: a section for each class of choices with the same options."""
    families: dict[tuple[object, ...], list[Choice]] = {}
    earlier: Choice | None = None
    for name in sorted(options(group), key=lambda name: name != "default"):
        chosen = choice(group, name)
        key = (chosen.target,) if group == "dataset" else (name,)
        families.setdefault(key, []).append(chosen)
    parts = [f"# {title}", intro]
    for family in families.values():
        first = family[0]
        names = "" if len(family) == 1 else "\n".join(f"- `{group}={one.name}`: {cell(one.summary)}" for one in family)
        parts.append(f"## `{group}={first.name}`" if len(family) == 1 else f"## {_class_title(first)}")
        if first.target is not None:
            parts.append(described(first.target))
        parts += [names or sentence(cell(first.summary))]
        if first.sets:
            parts.append("It sets " + ", ".join(f"`{item}`" for item in first.sets) + ".")
        rows = _different(first, earlier) if group in ("quantizer", "runtime") else first.options
        if earlier is not None and len(rows) < len(first.options):
            parts.append(f"Other options have the defaults of `{group}={earlier.name}`.")
        if rows:
            parts.append(table(rows))
            earlier = earlier or first
    return "\n\n".join(parts) + "\n"


def _different(chosen: Choice, earlier: Choice | None) -> Sequence[Option]:
    """Return the options whose defaults are not those of an earlier choice; all of them if there is none."""
    known = {option.key: option.default for option in earlier.options} if earlier is not None else {}
    return [option for option in chosen.options if known.get(option.key) != option.default]


def _class_title(chosen: Choice) -> str:
    assert chosen.target is not None
    return f"`{chosen.target.__name__}`"


def table(rows: Iterable[Option]) -> str:
    """Return a table of options: key, default, type, what it does, and the comment of the preset."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for option in rows:
        text = sentence(markdown(as_typed(option.meaning))) or sentence(cell(option.comment))
        note = f"<br>*In the preset:* {cell(option.comment)}" if option.meaning and option.comment else ""
        kind = f"*{cell(option.type)}.* " if option.type else ""
        lines.append(f"| {code(option.key)} | {code(option.default)} | {kind}{text}{note} |")
    return "\n".join(lines) + "\n"


def described(cls: type) -> str:
    """Return the docstring of a class as Markdown, without its sections (Args, Raises and so on)."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return markdown(re.split(r"\n+(?:Args|Attributes|Raises|Returns):\n", text)[0], keep_lines=True)


def markdown(docstring: str, keep_lines: bool = False) -> str:
    """Return a text of a docstring as Markdown: references to code become code.

    Args:
        docstring: the text.
        keep_lines: keep the breaks between paragraphs; False for a cell of a table.
    """
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")
    return text if keep_lines else cell(text)


def cell(text: str) -> str:
    """Return a text that can be in a cell of a table."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    """Escape what would be markup outside code in backquotes, and bars everywhere."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_<>\[\]])", r"\\\1", parts[i])
    return "`".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return a value as code in a cell."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter, unless it begins with code, and ends with a full stop."""
    text = text.strip()
    if not text:
        return ""
    return text[:1].upper() + text[1:] + ("" if text[-1] in ".:!?" else ".")


def bullets(lines: Sequence[str]) -> str:
    """Return a list."""
    return "\n".join(f"- {line}" for line in lines)
