"""A normal form of Python source: independent of comments, docstrings, formatting and the Python version."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

#: fields of a syntax tree that do not change what the code does, or that some supported Python versions lack
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
#: fields that hold statements
_BODIES = frozenset({"body", "orelse", "finalbody"})


def normal_form(source: str | bytes) -> str:
    """Return a text that changes only if the code of a Python source changes, for use in checksums.

    It is not affected by comments, docstrings, formatting, ``pass`` and ``if TYPE_CHECKING:`` blocks without an
    ``else``, nor by the version of Python that computes it.

    Raises:
        SyntaxError: `source` is not Python.
    """
    return text_of(ast.parse(source))


def text_of(tree: ast.AST) -> str:
    """Serialize a syntax tree to text that does not depend on the version of Python.

    `ast.dump` is no substitute: versions of Python differ in the empty fields that it shows, and in how it splits
    f-strings.
    """
    words: list[str] = []
    _write_node(tree, words)
    return "".join(words)


def _write_node(node: Any, words: list[str]) -> None:
    kind: Any = type(node)
    if kind is ast.JoinedStr:
        node = ast.JoinedStr(_merged(node.values))
    if isinstance(node, ast.AST):
        words.append(f"({kind.__name__}")
        for field, heading in _fields(kind):
            child = getattr(node, field, None)
            if field in _BODIES and isinstance(child, list):
                child = [part for part in child if not _idle(part)]
            if (child is None or child == []) and kind is not ast.Constant:  # a constant's value may be None
                continue
            if type(child) is str:  # most leaves: not worth a call
                words.append(f"{heading}str:{child!a}")
                continue
            words.append(heading)
            _write_node(child, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for part in node:
            _write_node(part, words)
            words.append(",")
        words.append("]")
    else:
        words.append(f"{kind.__name__}:{node!a}")


@cache
def _fields(kind: type[ast.AST]) -> list[tuple[str, str]]:
    """Return the fields of a node class that affect the code, each with the text that precedes it in the result."""
    return [(field, f" {field}=") for field in sorted(kind._fields) if field not in _SILENT]


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with neighbouring constants joined and empty ones dropped."""
    merged: list[ast.expr] = []
    for part in values:
        previous = merged[-1] if merged else None
        if isinstance(part, ast.Constant) and isinstance(previous, ast.Constant):
            merged[-1] = ast.Constant(str(previous.value) + str(part.value))
        else:
            merged.append(part)
    return [part for part in merged if not (isinstance(part, ast.Constant) and part.value == "")]


def _idle(node: Any) -> bool:
    """Return True for a statement without effect at run time: a bare string, `pass`, or ``if TYPE_CHECKING:``."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Pass) or for_types(node)


def for_types(node: Any) -> bool:
    """Return True if a node of a syntax tree is an ``if TYPE_CHECKING:`` block without an ``else``."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    name = node.test.attr if isinstance(node.test, ast.Attribute) else getattr(node.test, "id", None)
    return name == "TYPE_CHECKING"
