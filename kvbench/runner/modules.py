"""Python modules and how they depend on each other: base classes, imports, packages.

None is imported, because a report must not load torch just to find out whether a method was edited.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from kvbench.runner.module_facts import Module, load_facts, module_spec
from kvbench.runner.module_facts import digest_of_file as digest_of_file
from kvbench.runner.module_facts import module_digest as module_digest


def submodules(package: str) -> list[str]:
    """Return the dotted names of a package and of all modules in it. See :func:`package_files`."""
    return list(package_files(package))


def package_files(package: str) -> dict[str, Path]:
    """Return the files of a package and of all modules in it, by dotted name; empty if the package is not found.

    Of a plain module, only its own file is returned.
    """
    spec = module_spec(package)
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    if spec.submodule_search_locations is None:
        return {package: Path(spec.origin)}
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        names[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return names


def lineage(target: str) -> list[str]:
    """Return the names of the modules in which a class and its base classes are defined, the class's own module first.

    The module in the path `target` may define the class or only import it. Modules of the standard library are left
    out. If no ``class`` statement for the class is found, for example because a function call creates it, only the
    module named in `target` is returned.
    """
    module, _, cls = target.rpartition(".")
    modules: dict[str, None] = {}
    waiting, seen = [(module, cls)], set()
    while waiting:
        place = waiting.pop(0)
        if place in seen or standard(place[0]) or (content := load_facts(place[0])) is None:
            continue
        seen.add(place)
        name, cls = place
        if cls in content.bases:
            modules[name] = None
            waiting += [origin for base in content.bases[cls] for origin in _origins(name, content, base)]
        else:
            waiting += _origins(name, content, cls)
    if target and not modules and load_facts(module) is not None:  # made by a call: only its file is known
        modules[module] = None
    return list(modules)


def _origins(name: str, content: Module, base: str) -> Iterator[tuple[str, str]]:
    """Yield the (module, class) pairs to which a dotted name in the module called `name` may refer."""
    head, _, rest = base.partition(".")
    if base in content.bases:
        yield name, base
    elif head in content.names:
        module, _, cls = ".".join(filter(None, (content.names[head], rest))).rpartition(".")
        yield module, cls
    else:
        yield from ((star, base) for star in content.stars)


def is_quantizer(name: str, package: str) -> bool:
    """Return True if a module contains a quantizer.

    A quantizer is a class that derives from a class in `package`, that of kvbench's quantizers, or that defines the
    methods of a quantizer, such as `encode` and `decode`.
    """
    content = load_facts(name)
    if content is None:
        return False
    origins = (place for cls in content.bases for base in content.bases[cls] for place in _origins(name, content, base))
    return bool(content.quantizers) or any(below(module, (package,)) for module, _ in origins)


def closure(names: Iterable[str], follow: Callable[[str], bool], closed: Collection[str] = ()) -> dict[str, Module]:
    """Return the given modules and all modules that they import, directly or indirectly, as a dict by name.

    Modules without a file are left out. An imported module is included if `follow` returns True for its name; those in
    `closed` are included without the modules that they import.
    """
    modules: dict[str, Module] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in modules or (content := load_facts(name)) is None:
            continue
        modules[name] = content
        if name not in closed:
            waiting += [imported for imported in content.imports if follow(imported)]
    return modules


def below(name: str, packages: Iterable[str]) -> bool:
    """Return True if the module `name` is one of `packages`, or is inside one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def standard(name: str) -> bool:
    """Return True if a module belongs to the standard library."""
    return name.partition(".")[0] in sys.stdlib_module_names


@lru_cache(maxsize=4096)
def own(name: str) -> bool:
    """Return True if a module is the user's own: not part of kvbench, an installed package or the standard library."""
    if standard(name) or below(name, ("kvbench",)):
        return False
    spec = module_spec(name)
    return spec is not None and spec.origin is not None and not _installed(spec.origin)


def _installed(origin: str) -> bool:
    """Return True if a file belongs to an installed package, whose code its version identifies."""
    path = Path(origin).resolve()
    return "site-packages" in path.parts or any(path.is_relative_to(root) for root in _roots())


@lru_cache(maxsize=1)
def _roots() -> tuple[str, ...]:
    keys = ("purelib", "platlib", "stdlib", "platstdlib")
    return tuple({str(Path(sysconfig.get_path(key)).resolve()) for key in keys})
