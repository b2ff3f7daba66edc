"""Digests of the code on which a run's outputs depend, one per part (method, quantizer, task, ...).

Comments, docstrings, formatting, the folder and the version of Python do not affect a digest. The user's own code is
treated like kvbench's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvbench.results import code as codes
from kvbench.results.code import Code
from kvbench.runner import modules
from kvbench.runner.modules import below, own

#: hexadecimal digits of a digest
DIGITS = 12

_QUANTIZERS = "kvbench.quantizers"
#: packages of kvbench whose modules count towards the method, the task or the scorer only if it imports them; all
#: other packages serve every run
_METHOD = ("kvbench.methods", "kvbench.retrieval", "kvbench.calibration", _QUANTIZERS)
_TASK = ("kvbench.tasks",)
_SCORER = ("kvbench.metrics",)
#: modules whose imports are not followed: this imports quantizers even for methods that use none
_CLOSED = ("kvbench.methods.base",)
_SCORING = "kvbench.runner.scoring"

#: modules of the runner that decide which samples run and what is recorded, but not the outputs
_RECORDING = (
    *("run", "run_state", "ranks", "remarks", "origins", "resolve", "sources", "modules"),
    *("module_facts", "stored", "rerun", "scoring", "steps", "gate", "workers"),
)

#: modules of decoding that serve captured steps alone, which only a GPU has
_CAPTURED = (
    *("compiled", "graphs", "recordable", "recorded", "replay", "round_passes", "rounds"),
    *("segments", "tables"),
)

#: modules of rotations that serve kernels and captured steps alone
_ROTATING = ("kvbench.rotation.rotate_kernel", "kvbench.rotation.step")

#: the parts that all runs share: for each, its packages, and the modules and packages in them that it leaves out,
#: because they do not affect outputs or count towards the part ``kernels``
SHARED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cache": (("kvbench.cache", "kvbench.rotation"), ("kvbench.cache.kernels", *_ROTATING)),
    "attention": (
        ("kvbench.attention",),
        (
            "kvbench.attention.triton",
            "kvbench.attention.cuda",
            "kvbench.attention.codebook",
            "kvbench.attention.check_cases",
            "kvbench.attention.check_kernels",
            "kvbench.attention.synthetic",
        ),
    ),
    "decoding": (
        ("kvbench.decoding",),
        tuple(f"kvbench.decoding.{name}" for name in _CAPTURED),
    ),
    "runner": (
        ("kvbench.runner",),
        tuple(f"kvbench.runner.{name}" for name in _RECORDING),
    ),
    "model": (
        ("kvbench.models",),
        tuple(f"kvbench.models.{name}" for name in ("devices", "locate", "shared", "tiny", "verify")),
    ),
    # fast paths on a GPU; a run on a CPU does not depend on them
    "kernels": (
        (
            "kvbench.cache.kernels",
            "kvbench.attention.triton",
            "kvbench.attention.cuda",
            "kvbench.attention.codebook",
            "kvbench.linear",
            *(f"kvbench.decoding.{name}" for name in _CAPTURED),
            *_ROTATING,
        ),
        (),
    ),
}


def code(config: Mapping[str, Any]) -> Code:
    """Return the digest of each part of the source code on which the outputs of a run depend.

    Of `config`, only four things matter: the class of `method`, the class of `dataset`, whether there is a quantizer,
    and whether ``model.dtype`` is ``auto``.

    Returns:
        Digests by part of the code. ``method`` covers the method's class and base classes, and the modules of kvbench's
        methods and of the user that they import. ``task`` does the same for the data set, without its scoring. The
        other parts are ``quantizer``, ``scorer``, those in :data:`SHARED`, and the storage, which is not a digest. A
        digest is None if its part has no source file.
    """
    quantizer = config.get("quantizer") or {}
    method, task = (str(config[group].get("_target_") or "") for group in ("method", "dataset"))
    quantized = quantizer.get("name") not in (None, "none")
    return {**_method(method, quantized), **_task(task), **shared_code(), **codes.storage_now(config)}


def shared_code() -> Code:
    """Return the digests of the parts of kvbench's code that all methods and tasks use, by name (:data:`SHARED`)."""
    digests: Code = {}
    for part, (packages, left_out) in SHARED.items():
        files = {name: path for package in packages for name, path in modules.package_files(package).items()}
        digests[part] = _combined(
            {name: modules.digest_of_file(path) or "" for name, path in files.items() if not below(name, left_out)}
        )
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
        "quantizer": _combined({name: _digest_or_empty(name) for name in quantizers}),
    }


def _quantizes(name: str) -> bool:
    """Return True if a module belongs to kvbench's quantizers, or is the user's own and defines a quantizer."""
    return below(name, (_QUANTIZERS,)) or (own(name) and modules.is_quantizer(name, _QUANTIZERS))


def _task(target: str) -> Code:
    """Return the digests of a data set's own code and of its scorer.

    They are separate because an edited scorer needs no new predictions: the stored ones are scored again.
    """
    classes = modules.lineage(target)
    reached = modules.closure(classes, _follow(target, _TASK))
    imported = {name for module in reached.values() for name in module.imports if below(name, _SCORER)}
    scorers = modules.closure([*imported, _SCORING], lambda name: below(name, _SCORER))
    # members of the data set's own classes that score answers; they are left out of the task's digest
    members = {f"{name}:score": module.scorer for name, module in reached.items() if name in classes and module.scorer}
    return {
        "task": _combined(
            {name: module.without_scorer if name in classes else module.digest for name, module in reached.items()}
        ),
        "scorer": _combined({name: module.digest for name, module in scorers.items()} | members) if classes else None,
    }


def _follow(target: str, packages: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a predicate that is True for imported modules that count as part of the class at `target`.

    These are the modules in `packages`, in the class's own top-level package (unless that is kvbench), and the user's.
    """
    top = target.partition(".")[0]
    inside = packages if top == "kvbench" else (*packages, top)
    return lambda name: below(name, inside) or own(name)


def _digest_or_empty(name: str) -> str:
    return modules.module_digest(name) or ""


def _combined(digests: Mapping[str, str]) -> str | None:
    """Return one digest over the names and digests of several modules, or None if there are none."""
    return _hash(sorted(digests.items())) if digests else None


def _hash(pairs: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("\n".join(f"{name} {content}" for name, content in pairs).encode()).hexdigest()[:DIGITS]
