"""Facts about Python modules, read from their source files: what their code is, and what they import.

No module is imported, because a report must not load torch just to find out whether a method was edited.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from kvbench.util.normal_form import for_types, text_of

#: suffixes of sources in other languages, which are compiled when a run needs them
NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")

#: a string literal that may name a file in the module's folder, which then counts as part of the module's code
_DATA_FILE = re.compile(rb"""["']([\w-][\w./-]{0,80}\.(?:json|jsonl|yaml|yml|txt|cc?|cpp|cuh?|h|hpp))["']""")
#: sets of methods; a class that has all of one set is a quantizer (:mod:`kvbench.quantizers`)
_QUANTIZER_METHODS = ({"encode", "decode"}, {"quantize", "dequantize"}, {"encode_groups", "decode"})
#: arguments of the methods with which a data set scores answers
_SCORED = (["self", "sample", "prediction"], ["self", "sample", "predictions"])


@dataclass(frozen=True)
class Module:
    """Facts about a source file; of a file that is not Python, only digests of its bytes.

    Attributes:
        digest: digest of the source without comments, docstrings and formatting.
        unscored: the same, but without the class members that score answers: ``scorer_version``, and ``score`` and
            ``score_questions`` with the arguments that :class:`kvbench.tasks.base.Task` has.
        scorer: digest of only those members; empty if there are none.
        imports: dotted names of imported modules, or of imported objects in modules. Imports inside functions count.
            Those inside ``if TYPE_CHECKING:`` count only if the module has a ``__getattr__``, which then imports them
            on first use.
        bound: names that imports bind, with the dotted name for which each stands; for example ``np``: ``numpy``.
        data: files in the module's folder whose names occur in the source, by that name.
        kernel: True for a module of kvbench that imports Triton when it is imported, so that it runs on GPUs alone.
        quantizer: True if a class derives from one of kvbench's quantizers, or defines a quantizer's methods.
    """

    digest: str
    unscored: str
    scorer: str = ""
    imports: frozenset[str] = frozenset()
    bound: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Path] = field(default_factory=dict)
    kernel: bool = False
    quantizer: bool = False


def load(name: str, path: Path | None) -> Module | None:
    """Return the facts about a module in a file; None if there is no such file. Relative imports begin from `name`."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    if path is None or status is None or not stat.S_ISREG(status.st_mode):
        return None
    return _read(name, path, status.st_mtime_ns, status.st_size)


def module_file(name: str) -> Path | None:
    """Return a module's file without importing the module or its packages; None without a file, as in a notebook."""
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ``__main__`` of a prompt
        return None
    for part in filter(None, rest.split(".")):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def package_files(package: str) -> dict[str, Path]:
    """Return the files of a package and of all modules in it, by dotted name.

    They include native sources; the key is the folder's dotted name followed by the file's name: ``a.b.kernel.cu``.
    """
    start = module_file(package)
    found: dict[str, Path] = {}
    if start is None:
        return found
    for folder, _, names in os.walk(start.parent):
        prefix = ".".join([package, *Path(folder).relative_to(start.parent).parts])
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix in (".py", *NATIVE):
                inner = stem if suffix == ".py" else name
                found[prefix if inner == "__init__" else f"{prefix}.{inner}"] = Path(folder, name)
    return found


def reached(
    names: Iterable[str], enters: Callable[[str], bool], place: Callable[[str], Path | None], *, kernels: bool = False
) -> dict[str, Module]:
    """Return modules and all that they import, directly or indirectly, by name; those without a file are left out.

    The packages that contain a module are included with their `__init__.py`, but imports of this file are followed only
    if the package itself is imported, or a name from it (``from package import name``).

    Args:
        names: dotted names of modules, or of objects in modules, such as classes.
        enters: function that returns True for imported names that are followed.
        place: function that returns the file of a module, or None if there is none.
        kernels: True to follow what kernels import too.
    """
    found: dict[str, Module] = {}
    waiting = list(names)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        package, _, last = name.rpartition(".")
        if (module := load(name, place(name))) is not None:
            found[name] = module
            further = set(module.imports) if kernels or not module.kernel else set[str]()
        else:  # what a module holds, or what a package imports for others
            path = place(package)
            holder = load(package, path) if path is not None and path.name == "__init__.py" else None
            further = {holder.bound.get(last, package) if holder is not None else package}
        while package and package not in found and enters(package):
            if (module := load(package, place(package))) is not None:
                found[package] = module
            package = package.rpartition(".")[0]
        further = {other for other in further - seen if enters(other)}
        waiting += further
        seen |= further
    return found


def below(name: str, packages: Collection[str]) -> bool:
    """Return True if the module `name` is one of `packages`, or is inside one of them."""
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


@lru_cache(maxsize=4096)
def own(name: str) -> bool:
    """Return True if a module is the user's own: not part of kvbench, an installed package or the standard library."""
    if name.partition(".")[0] in ("", "kvbench", *sys.stdlib_module_names):
        return False
    path = module_file(name)
    return path is not None and not _installed(path.resolve())


def _installed(path: Path) -> bool:
    """Return True if a file belongs to an installed package, whose code its version identifies."""
    return "site-packages" in path.parts or any(path.is_relative_to(root) for root in _roots())


@lru_cache(maxsize=1)
def _roots() -> tuple[str, ...]:
    keys = ("purelib", "platlib", "stdlib", "platstdlib")
    return tuple({str(Path(sysconfig.get_path(key)).resolve()) for key in keys})


@lru_cache(maxsize=2048)
def _read(name: str, path: Path, modified: int, size: int) -> Module:
    """Return the facts about a file, cached by `modified` (time) and `size`, which change when it is written."""
    source = path.read_bytes()
    tree = _tree(source) if path.suffix == ".py" else None  # else data, a native source or a compiled extension
    if tree is None:
        digest = hashlib.sha256(source).hexdigest()
        return Module(digest, digest)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(_statements(tree))
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node, _ in nodes)
    imported = [
        (*pair, place)
        for node, place in nodes
        if isinstance(node, ast.Import | ast.ImportFrom) and (lazy or place != "types")
        for pair in _imported(node, package)
    ]
    bound = {short: target for short, target, _ in imported}
    at_once = {target for _, target, place in imported if place == "module"}
    named = [found.decode() for found in _DATA_FILE.findall(source)]
    classes = [node for node, _ in nodes if isinstance(node, ast.ClassDef)]
    whole, scorer, quantizer = _digest(tree), [], any(_quantizes(cls, bound) for cls in classes)
    for cls in classes:
        scorer += [member for member in cls.body if _scores(member)]
        cls.body = [member for member in cls.body if not _scores(member)]
    return Module(
        whole,
        _digest(tree) if scorer else whole,
        _digest(*scorer) if scorer else "",
        frozenset(target for _, target, _ in imported),
        bound,
        {data: path.parent / data for data in named if ".." not in data.split("/")},
        below(name, ("kvbench",)) and any(below(target, ("triton",)) for target in at_once),
        quantizer,
    )


def _tree(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _digest(*nodes: ast.AST) -> str:
    return hashlib.sha256("".join(map(text_of, nodes)).encode()).hexdigest()


def _statements(node: ast.AST, place: str = "module") -> Iterator[tuple[ast.AST, str]]:
    """Yield the statements inside a node, each with its place: ``module``, ``function``, or ``types``.

    ``types`` is the inside of ``if TYPE_CHECKING:``.
    """
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child, place
            inside = "function" if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else place
            yield from _statements(child, "types" if place == "types" or for_types(child) else inside)


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and the dotted name for which it stands."""
    origin = ""
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
        origin = "".join(f"{part}." for part in (*above, *([node.module] if node.module else [])))
    yield from ((alias.asname or alias.name, f"{origin}{alias.name}") for alias in node.names)


def _scores(member: ast.stmt) -> bool:
    """Return True if a class member scores answers or sets the scorer's version."""
    if isinstance(member, ast.FunctionDef):
        return member.name in ("score", "score_questions") and [arg.arg for arg in member.args.args] in _SCORED
    targets = member.targets if isinstance(member, ast.Assign) else [getattr(member, "target", None)]
    return [getattr(target, "id", None) for target in targets] == ["scorer_version"]


def _quantizes(cls: ast.ClassDef, bound: Mapping[str, str]) -> bool:
    """Return True if a class is a quantizer; `bound` is :attr:`Module.bound` of its module."""
    for base in cls.bases:
        head, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        if below(f"{bound.get(head, head)}.{rest}", ("kvbench.quantizers",)):
            return True
    methods = {member.name for member in cls.body if isinstance(member, ast.FunctionDef)}
    return any(names <= methods for names in _QUANTIZER_METHODS)
