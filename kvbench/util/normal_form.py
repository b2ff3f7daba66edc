"""A normal form of Python source: independent of comments, docstrings, formatting and the Python version."""

from __future__ import annotations

import ast
from typing import Any

#: fields of a syntax tree that do not change what the code does, or that some supported Python versions lack
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


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
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(_merged(node.values))
    if isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for field in sorted(node._fields):
            child = getattr(node, field, None)
            if isinstance(child, list):
                child = [part for part in child if not _idle(part)]
            is_constant = field == "value" and isinstance(node, ast.Constant)  # here None is the constant None
            if field in _SILENT or ((child is None or child == []) and not is_constant):
                continue
            words.append(f" {field}=")
            _write_node(child, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for part in node:
            _write_node(part, words)
            words.append(",")
        words.append("]")
    else:
        words.append(f"{type(node).__name__}:{node!a}")


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
