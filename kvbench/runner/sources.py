"""A digest of the code behind a method: its class and bases, its quantizers, and what their modules import of these.

The same for code that does the same to a reader: comments, docstrings, formatting, the folder that the code lies in and
the version of Python leave it alone. What attention and the caches do with a method's stores is not in it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from kvbench.methods.base import Method

#: modules of kvbench that say how a method stores tokens; others serve all methods alike
_RULES = ("kvbench.methods", "kvbench.quantizers", "kvbench.retrieval", "kvbench.calibration")
_QUANTIZERS = "kvbench.quantizers"
#: serves every method, and imports quantizers for those that have one
_BASE = Method.__module__

#: hexadecimal digits of a digest
DIGITS = 12

#: fields of a syntax tree that say nothing of what the code does, or not in all versions of Python
_SILENT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


def digest(method: Method) -> str | None:
    """Digest of the sources of a method with its quantizer; None where a class has no source (typed at a prompt)."""
    waiting = [cls.__module__ for cls in type(method).__mro__ if cls is not object]
    waiting = [name for name in waiting if name.partition(".")[0] not in sys.stdlib_module_names]
    if method.quantizer is not None:
        waiting += _submodules(_QUANTIZERS)
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        spec = _spec(name)
        if spec is None or spec.origin is None:
            return None
        found[name], imported = _read(spec.origin, Path(spec.origin).stat().st_mtime_ns, name)
        if name != _BASE:
            waiting += [each for each in imported if _followed(each)]
    text = "\n".join(f"{name} {content}" for name, content in sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def normal_form(source: str) -> str:
    """What is left of Python source without comments, docstrings, formatting and marks of Python's version.

    Raises:
        SyntaxError: it is no Python.
    """
    return "".join(_walk(ast.parse(source)))


def _walk(node: Any) -> Iterator[str]:
    """A syntax tree as text; empty fields are left out, since versions of Python differ in them."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field in sorted(set(node._fields) - _SILENT):
            value = getattr(node, field, None)
            if isinstance(value, list):
                value = [each for each in value if not _docstring(each)]
            if isinstance(node, ast.JoinedStr):
                value = _merged(node.values)
            if (value is None and not (isinstance(node, ast.Constant) and field == "value")) or value == []:
                continue
            yield f" {field}="
            yield from _walk(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for each in node:
            yield from _walk(each)
            yield ","
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!a}"


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string with its constant ones joined: versions of Python cut these differently."""
    made: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and made and isinstance(made[-1], ast.Constant):
            made[-1] = ast.Constant(str(made[-1].value) + str(value.value))
        else:
            made.append(value)
    return [value for value in made if not (isinstance(value, ast.Constant) and value.value == "")]


def _docstring(node: Any) -> bool:
    """Whether a statement is a text by itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@lru_cache(maxsize=512)
def _read(path: str, changed: int, name: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a file (of the time `changed`), and the modules that it imports."""
    data = Path(path).read_bytes()
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):  # compiled
        return hashlib.sha256(data).hexdigest(), ()
    content = "".join(_walk(tree))
    package = name if Path(path).name == "__init__.py" else name.rpartition(".")[0]
    return hashlib.sha256(content.encode()).hexdigest(), tuple(sorted(set(_imports(tree, package))))


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Names that may be modules: those imported, those imported from, and those of what is imported from these."""
    typing = {each for node in ast.walk(tree) if _for_types(node) for part in node.body for each in ast.walk(part)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _followed(name: str) -> bool:
    """Whether an imported module belongs to the method: one of kvbench's that hold rules, or the user's own."""
    top = name.partition(".")[0]
    if top == "kvbench":
        return any(name == rule or name.startswith(f"{rule}.") for rule in _RULES) and _spec(name) is not None
    if top in sys.stdlib_module_names:
        return False
    spec = _spec(name)
    return spec is not None and spec.origin is not None and not _installed(spec.origin)


def _installed(origin: str) -> bool:
    """Whether a file is of an installed package, whose version says which it is."""
    roots = {str(Path(sysconfig.get_path(key)).resolve()) for key in ("purelib", "platlib", "stdlib", "platstdlib")}
    path = Path(origin).resolve()
    return "site-packages" in path.parts or any(path.is_relative_to(root) for root in roots)


def _submodules(package: str) -> list[str]:
    spec = _spec(package)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return [package, *(f"{package}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")]


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is from, found without importing anything; None where there is no such module."""
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # typed at a prompt
        return None
    for part in filter(None, rest.split(".")):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec if spec is not None and spec.has_location else None
