"""Digests of the code that a run's outputs depend on, part by part.

A part's digest stays the same for code that does the same: comments, docstrings, formatting, the folder and the
version of Python do not count. Code outside the package is treated as kvbench's own is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvbench.results.code import Code
from kvbench.runner import modules
from kvbench.runner.modules import below, own

#: hexadecimal digits of a digest
DIGITS = 12

_QUANTIZERS = "kvbench.quantizers"
#: kvbench's packages that belong to the part when its modules import them; others serve all runs alike
_METHOD = ("kvbench.methods", "kvbench.retrieval", "kvbench.calibration", _QUANTIZERS)
_TASK = ("kvbench.tasks",)
_SCORER = ("kvbench.metrics",)
#: imports quantizers on behalf of the methods that have one
_CLOSED = ("kvbench.methods.base",)
_SCORING = "kvbench.runner.scoring"

#: modules of the runner that decide what is done and recorded, not what comes out of a prompt
_RECORDING = ("run", "ranks", "remarks", "failures", "resolve", "sources", "modules", "stored", "scoring")

#: shared parts: the packages in them, and what inside these changes no output
SHARED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cache": (("kvbench.cache",), ("kvbench.cache.kernels",)),
    "attention": (
        ("kvbench.attention",),
        (
            "kvbench.attention.triton",
            "kvbench.attention.cuda",
            "kvbench.attention.check_cases",
            "kvbench.attention.check_kernels",
            "kvbench.attention.synthetic",
        ),
    ),
    "decoding": (
        ("kvbench.decoding",),
        tuple(
            f"kvbench.decoding.{name}"
            for name in ("captured", "graphs", "compiled", "replay", "matvec", "matvec_kernel", "step")
        ),
    ),
    "runner": (
        ("kvbench.runner",),
        tuple(f"kvbench.runner.{name}" for name in _RECORDING),
    ),
    "model": (
        ("kvbench.models",),
        tuple(f"kvbench.models.{name}" for name in ("devices", "labels", "locate", "served", "tiny", "verify")),
    ),
    # fast paths on a GPU; a run on a CPU does not depend on them
    "kernels": (
        (
            "kvbench.cache.kernels",
            "kvbench.attention.triton",
            "kvbench.attention.cuda",
            *(f"kvbench.decoding.{name}" for name in ("captured", "graphs", "compiled", "replay", "matvec")),
            *(f"kvbench.decoding.{name}" for name in ("matvec_kernel", "step")),
        ),
        (),
    ),
}


def code(config: Mapping[str, Any]) -> Code:
    """Return the digest of each part of the code that a run of this configuration uses.

    Args:
        config: composed configuration; ``_target_`` of `method` and `dataset` and the presence of a quantizer count.

    Returns:
        Part -> digest: ``method`` (the class, its bases, what they import of methods and of the user's files),
        ``quantizer``, ``task``, ``scorer``, and the :data:`SHARED` parts. None for a class without a source file.
    """
    quantizer = config.get("quantizer") or {}
    method, task = (str(config[group].get("_target_") or "") for group in ("method", "dataset"))
    return {**_method(method, quantizer.get("name") not in (None, "none")), **_task(task), **shared()}


def shared() -> Code:
    """Return the digests of the code that all methods and tasks share."""
    digests: Code = {}
    for part, (packages, left_out) in SHARED.items():
        names = [name for package in packages for name in modules.submodules(package)]
        digests[part] = _combined({name: _whole(name) for name in names if not below(name, left_out)})
    return digests


def _method(target: str, quantized: bool) -> Code:
    """Return the digests of a method's own code and of the quantizers that it uses."""
    classes = modules.lineage(target)
    reached = modules.closure(classes, _follow(target, _METHOD), _CLOSED)
    quantizers = {name for name in reached if name not in classes and _quantizes(name)}
    if quantized:
        quantizers |= set(modules.submodules(_QUANTIZERS))
    return {
        "method": _combined({name: module.digest for name, module in reached.items() if name not in quantizers}),
        "quantizer": _combined({name: _whole(name) for name in quantizers}),
    }


def _quantizes(name: str) -> bool:
    """Return True for a module of kvbench's quantizers, and for one of the user's that defines a quantizer."""
    return below(name, (_QUANTIZERS,)) or (own(name) and modules.is_quantizer(name, _QUANTIZERS))


def _task(target: str) -> Code:
    """Return the digests of a data set's own code and of its scorer.

    They are apart because an edited scorer needs no new predictions: stored ones are scored anew.
    """
    classes = modules.lineage(target)
    reached = modules.closure(classes, _follow(target, _TASK))
    imported = {name for module in reached.values() for name in module.imports if below(name, _SCORER)}
    scorers = modules.closure([*imported, _SCORING], lambda name: below(name, _SCORER))
    members = {f"{name}:score": module.scorer for name, module in reached.items() if name in classes and module.scorer}
    return {
        "task": _combined(
            {name: module.without_scorer if name in classes else module.digest for name, module in reached.items()}
        ),
        "scorer": _combined({name: module.digest for name, module in scorers.items()} | members) if classes else None,
    }


def _follow(target: str, packages: tuple[str, ...]) -> Callable[[str], bool]:
    """Return the rule by which imports belong to a class's code: `packages`, its own package, the user's files."""
    top = target.partition(".")[0]
    inside = packages if top == "kvbench" else (*packages, top)
    return lambda name: below(name, inside) or own(name)


def _whole(name: str) -> str:
    return modules.digest(name) or ""


def _combined(digests: Mapping[str, str]) -> str | None:
    """Return one digest over several modules' names and digests; None for none."""
    return _hash(sorted(digests.items())) if digests else None


def _hash(pairs: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("\n".join(f"{name} {content}" for name, content in pairs).encode()).hexdigest()[:DIGITS]
