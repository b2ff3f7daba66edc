"""Facts about a Python module, read from its source file without importing it: digest, imports, classes and bases."""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.util
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from kvbench.util.normal_form import for_types, text_of

#: a string literal that may name a file in the module's folder, which then counts as part of the module's code
_DATA_FILE = re.compile(rb"""["']([\w-][\w./-]{0,80}\.(?:json|jsonl|yaml|yml|txt|cu|cuh|cpp|h))["']""")

#: path, modification time and size of a file: equal stamps mean that the file has not been written in between
Stamp = tuple[str, int, int]

#: sets of methods; a class outside the package that has all of one set is a quantizer (:mod:`kvbench.quantizers`)
_QUANTIZER_METHODS = ({"encode", "decode"}, {"quantize", "dequantize"}, {"encode_groups", "decode"})


@dataclass(frozen=True)
class Module:
    """Facts about a Python module. Imports inside ``if TYPE_CHECKING:`` are ignored.

    Attributes:
        digest: digest of the source without comments, docstrings and formatting, and of the data files in the module's
            folder whose names occur in the source.
        without_scorer: the same digest, but without the class members that score answers (``score``,
            ``score_questions``, ``scorer_version``).
        scorer: digest of only those members; empty if there are none.
        imports: dotted names of what may be imported modules. ``import a`` gives ``a``. ``from a import b`` gives ``a``
            and ``a.b``, because b may be a module.
        names: for each name that an import binds, the dotted path that it refers to; for example ``np`` for ``numpy``.
        stars: modules from which everything is imported (``from a import *``).
        bases: for each class, the dotted names of its base classes, as written in the source.
        quantizers: names of the classes that define the methods of a quantizer, such as `encode` and `decode`.
    """

    digest: str
    without_scorer: str
    scorer: str
    imports: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    stars: tuple[str, ...] = ()
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quantizers: frozenset[str] = frozenset()


def load_facts(name: str) -> Module | None:
    """Return the facts about a module, or None if it has no file, as in a notebook or for a namespace package."""
    stamps = _stamps(name)
    return _read_facts(name, *stamps) if stamps else None


def module_digest(name: str) -> str | None:
    """Return only the digest of a module, in half the time of :func:`load_facts`; None if the module has no file."""
    stamps = _stamps(name)
    return _read_digest(*stamps) if stamps else None


def digest_of_file(path: Path) -> str | None:
    """Return what :func:`module_digest` returns for the module in a file, without looking for the module."""
    stamps = _stamps_of_file(path)
    return _read_digest(*stamps) if stamps else None


def _stamps(name: str) -> tuple[Stamp, ...]:
    """Return the stamps of a module's file and of the data files that it names; empty if the module has no file."""
    spec = module_spec(name)
    return () if spec is None or spec.origin is None else _stamps_of_file(Path(spec.origin))


def _stamps_of_file(path: Path) -> tuple[Stamp, ...]:
    own = _stamp(path)
    if own is None:
        return ()
    paths = (path.parent / file for file in _data_files(own) if ".." not in Path(file).parts)
    return (own, *filter(None, map(_stamp, paths)))


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (str(path), status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


@lru_cache(maxsize=1024)
def _data_files(stamp: Stamp) -> tuple[str, ...]:
    """Return the file names that occur as string literals in a source."""
    return tuple(sorted({name.decode() for name in _DATA_FILE.findall(Path(stamp[0]).read_bytes())}))


def module_spec(name: str) -> ModuleSpec | None:
    """Return the import spec of a module, without importing the module or the package that contains it.

    It is None if the module is not found or has no file.
    """
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ``__main__`` of a prompt
        return None
    for part in filter(None, rest.split(".")):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec if spec is not None and spec.has_location else None


@lru_cache(maxsize=1024)
def _read_digest(stamp: Stamp, *data: Stamp) -> str:
    tree = _parsed(stamp[0])
    return _source_digest(text_of(tree), data) if isinstance(tree, ast.AST) else tree


@lru_cache(maxsize=1024)
def _read_facts(name: str, stamp: Stamp, *data: Stamp) -> Module:
    path = stamp[0]
    tree = _parsed(path)
    if isinstance(tree, str):
        return Module(tree, tree, "")
    package = name if Path(path).name == "__init__.py" else name.rpartition(".")[0]
    imports, names, stars = _imports(tree, package)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    whole = _source_digest(text_of(tree), data)
    scorer = [(cls, [member for member in cls.body if _scores(member)]) for cls in classes]
    without, alone = whole, ""
    if any(members for _, members in scorer):
        alone = _source_digest("".join(text_of(member) for _, members in scorer for member in members))
        for cls, members in scorer:
            cls.body = [member for member in cls.body if member not in members]
        without = _source_digest(text_of(tree), data)
    return Module(
        whole,
        without,
        alone,
        tuple(sorted(imports)),
        names,
        tuple(stars),
        {cls.name: tuple(filter(None, map(_dotted, cls.bases))) for cls in classes},
        frozenset(cls.name for cls in classes if any(names <= _methods(cls) for names in _QUANTIZER_METHODS)),
    )


def _parsed(path: str) -> ast.Module | str:
    """Return a file's syntax tree, or the SHA-256 of its bytes if it is not Python source (a compiled extension)."""
    source = Path(path).read_bytes()
    collecting = gc.isenabled()
    gc.disable()  # a tree is many small objects, and none of them is garbage yet
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()
    finally:
        if collecting:
            gc.enable()


def _source_digest(text: str, data: Iterable[Stamp] = ()) -> str:
    """Return the digest of a source's normal form together with the content of data files."""
    digest = hashlib.sha256(text.encode())
    for path, *_ in data:
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def _scores(member: ast.stmt) -> bool:
    """Return True if a class member scores predictions or sets the scorer's version."""
    if isinstance(member, ast.FunctionDef):
        return member.name in ("score", "score_questions")
    target: ast.expr | None = member.target if isinstance(member, ast.AnnAssign) else None
    if isinstance(member, ast.Assign) and len(member.targets) == 1:
        target = member.targets[0]
    return isinstance(target, ast.Name) and target.id == "scorer_version"


def _methods(cls: ast.ClassDef) -> set[str]:
    return {member.name for member in cls.body if isinstance(member, ast.FunctionDef)}


def _dotted(node: ast.expr) -> str | None:
    """Return a dotted name as written (``kivi.Kivi``), without type parameters; None for any other expression."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _imports(tree: ast.AST, package: str) -> tuple[set[str], dict[str, str], list[str]]:
    """Return the fields `imports`, `names` and `stars` of :class:`Module` for a syntax tree in `package`."""
    imports: set[str] = set()
    names: dict[str, str] = {}
    stars: list[str] = []
    nodes = list(ast.walk(tree))
    skipped = {node for block in nodes if for_types(block) for node in ast.walk(block)}
    for node in nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
            names |= {alias.asname or alias.name.partition(".")[0]: _bound(alias) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            imports |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
            stars += [origin for alias in node.names if alias.name == "*"]
            names |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return imports, names, stars


def _bound(alias: ast.alias) -> str:
    """Return the module that an import binds: ``a`` for ``import a.b``, ``a.b`` for ``import a.b as c``."""
    return alias.name if alias.asname else alias.name.partition(".")[0]
