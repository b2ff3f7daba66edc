"""Digests of the code on which a run's outputs depend, one per part (method, quantizer, task, ...).

What counts is found by following imports: from the modules that run batches of samples, from the method's and from the
data set's. So an edit of any module that a run may execute changes a digest, and no list of modules is kept by hand.
Comments, docstrings, formatting, the folder and the version of Python do not affect a digest. The user's own code is
treated like kvbench's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.results import code as codes
from kvbench.results.code import SCORER, Code
from kvbench.runner import modules
from kvbench.runner.modules import NATIVE, Module, below, own

#: hexadecimal digits of a digest
DIGITS = 12

#: the modules that run a batch of samples, of one method and of several; all that they import serves every run
ROOTS = ("kvbench.runner.session", "kvbench.runner.shared_prefill")
#: the module that scores answers; edits of it and of what it imports need no new answers
SCORING = "kvbench.runner.scoring"
#: packages that cannot change an output: command lines, files, clocks, messages, downloads that are verified
LEFT_OUT = tuple(
    f"kvbench.{name}"
    for name in (
        *("__main__", "analysis", "bench", "calibrate", "cli", "errors", "fetch", "hub", "lm_eval", "loggers", "page"),
        *("profiling", "publish", "report", "results", "score"),
    )
)
#: packages of which a run uses what its method, its quantizer and its data set import
CHOSEN = ("kvbench.calibration", "kvbench.quantizers", "kvbench.retrieval", "kvbench.tasks")
#: parts that only some rows used (:func:`kvbench.results.code.used`), and the modules through which they are reached
OPTIONAL = {
    codes.STEPS: ("kvbench.decoding.graphs", "kvbench.decoding.recorded", "kvbench.decoding.rounds"),
    codes.POINTS: ("kvbench.runner.points",),
    codes.FIDELITY: ("kvbench.runner.fidelity",),
}
#: parts that are not named for their package
_NAMES = {"methods": "method", "models": "model"}

_QUANTIZERS, _METRICS = "kvbench.quantizers", "kvbench.metrics"


def code(config: Mapping[str, Any]) -> Code:
    """Return the digest of each part of the source code on which the outputs of a run depend.

    Of `config`, only four things matter: the class of `method`, the class of `dataset`, whether there is a quantizer,
    and whether ``model.dtype`` is ``auto``.

    Returns:
        Digests by part of the code. ``method`` covers kvbench's methods and the user's modules that the method's class
        needs, ``task`` those that the data set needs, without its scoring. The other parts are ``quantizer``,
        ``scorer``, those of :func:`shared`, and the storage, which is no digest. One is None if the part has no source
        file.
    """
    quantizer = (config.get("quantizer") or {}).get("name") not in (None, "none")
    method, task = (str(config[group].get("_target_") or "") for group in ("method", "dataset"))
    package = _Package()
    return {**package.method(method, quantizer), **package.task(task), **codes.storage_now(config)}


def shared() -> Code:
    """Return the digests of what all methods and data sets use of kvbench's code.

    There is a part for each package (``cache``, ``attention``, ...) with what a run may execute on a CPU, one for the
    kernels of each package (``cache/kernels``) and for each family of kernels of attention (``attention/cuda``), and
    those of :data:`OPTIONAL`. Of the last three, rows record only what they used.
    """
    return _Package().shared()


class _Package:
    """kvbench's source files as they are now, and which of them every run may execute.

    Attributes:
        files: the files of modules by name, with native sources (:func:`kvbench.runner.modules.files`).
        families: the parts that are kernels of attention, one of which serves a step: the folders of
            `kvbench/attention/` with a module ``decode`` or native sources.
        optional: for each part that only some rows used, the modules through which it is reached, or packages of them.
        base: modules that every run may execute, on a CPU too.
        kernels: modules that these import on a GPU.
    """

    def __init__(self) -> None:
        self.files = modules.files("kvbench")
        inside = [name.split(".") for name in self.files if name.startswith("kvbench.attention.")]
        self.families = {f"attention/{names[2]}" for names in inside if names[3:] == ["decode"] or _native(names[-1])}
        self.optional = {part: (f"kvbench.{part.replace('/', '.')}",) for part in self.families} | OPTIONAL
        self.base: dict[str, Module] = {}
        found = modules.reached(ROOTS, self._outside(CHOSEN), self._place)
        self.kernels = {name for name, module in found.items() if module.kernel}
        self.base = _without(found, self.kernels)

    def shared(self) -> Code:
        """See :func:`shared`."""
        packages: dict[str, dict[str, Module]] = {}
        for name, module in self.base.items():
            packages.setdefault(name.split(".")[1], {})[name] = module
        digests = {_NAMES.get(package, package): _digest(found) for package, found in packages.items()}
        roots = {part: [name for name in self.files if below(name, names)] for part, names in self.optional.items()}
        for name in self.files:
            if name in self.kernels or _native(name):
                roots.setdefault(self._home(name), []).append(name)
        return digests | {part: self._optional_digest(part, names) for part, names in roots.items()}

    def method(self, target: str, quantized: bool) -> Code:
        """Return the digests of a method's own code and its quantizers, and of all that runs share.

        The kernels that only this method uses count among those of their packages.
        """
        found, home = self._needed(target, ("kvbench.tasks",)), target.rpartition(".")[0]
        self.kernels |= {name for name, module in found.items() if module.kernel}
        quantizers = {
            name: module
            for name, module in found.items()
            if below(name, (_QUANTIZERS,)) or (module.quantizer and name != home and own(name))
        }
        rest = {name: module for name, module in self.base.items() if below(name, ("kvbench.methods",))}
        rest |= _without(found, self.kernels | quantizers.keys())
        if quantized:
            names = [name for name in self.files if below(name, (_QUANTIZERS,))]
            quantizers |= modules.reached(names, lambda name: False, self._place)
        known = found or home in self.base
        return {**self.shared(), "method": _digest(rest) if known else None, "quantizer": _digest(quantizers)}

    def task(self, target: str) -> Code:
        """Return the digests of a data set's own code and of its scorer.

        They are separate because an edited scorer needs no new predictions: the stored ones are scored again.
        """
        found = self._needed(target, ("kvbench.methods", *CHOSEN[:-1], _METRICS))
        metrics = {name for module in found.values() for name in module.imports if below(name, (_METRICS,))}
        scorers = modules.reached([SCORING, *metrics], lambda name: below(name, (_METRICS,)), self._place)
        members = {f"{name}:score": module.scorer for name, module in found.items() if module.scorer}
        return {"task": _digest(found, scored=False), codes.SCORER: _digest(scorers, members) if found else None}

    def _needed(self, target: str, closed: tuple[str, ...]) -> dict[str, Module]:
        """Return the module of the class `target`, and all that it imports beside the base.

        The user's modules and those of the class's own top-level package are followed, and of kvbench's all but those
        in `closed`.
        """
        top, inside = target.partition(".")[0], self._outside(("kvbench.runner", "kvbench.config", *closed))

        def enters(name: str) -> bool:
            return inside(name) if below(name, ("kvbench",)) else below(name, (top,)) or own(name)

        return modules.reached([target] if target else [], enters, self._place)

    def _outside(self, closed: tuple[str, ...], part: str = "") -> Callable[[str], bool]:
        """Return a predicate for modules of kvbench that are neither in the base nor in `closed`, nor optional.

        Only what is in the optional `part` is let through; families of kernels may use each other's modules.
        """
        mine = self.families if part in self.families else {part}
        others = [name for other, names in self.optional.items() if other not in mine for name in names]
        shut = tuple(f"{name}." for name in (*LEFT_OUT, *closed, *others, SCORING))
        return lambda name: name.startswith("kvbench.") and name not in self.base and not f"{name}.".startswith(shut)

    def _place(self, name: str) -> Path | None:
        return self.files.get(name) if below(name, ("kvbench",)) else modules.find(name)

    def _optional_digest(self, part: str, names: Iterable[str]) -> str | None:
        """Return the digest of an optional part: modules and native sources, and what they import beside the base.

        The native sources of all families of kernels count whose modules are among them.
        """
        found = modules.reached(names, self._outside(CHOSEN, part), self._place, kernels=True)
        homes = {self._home(name) for name in found} & self.families
        native = [name for name in self.files if _native(name) and self._home(name) in homes]
        return _digest(found | modules.reached(native, lambda name: False, self._place))

    def _home(self, name: str) -> str:
        """Return the part to which a kernel's source belongs: its family of attention, or its package's kernels."""
        _, package, *inside = name.split(".")
        family = f"{package}/{''.join(inside[:1])}"
        return family if family in self.families else f"{package}/kernels"


def _native(name: str) -> bool:
    return name.endswith(NATIVE)


def _without(found: Mapping[str, Module], others: Collection[str]) -> dict[str, Module]:
    return {name: module for name, module in found.items() if name not in others}


def _digest(found: Mapping[str, Module], more: Mapping[str, str] | None = None, *, scored: bool = True) -> str | None:
    """Return one digest over modules and their data files, or None if there are none.

    Args:
        more: further digests by name.
        scored: False: without the class members that score answers.
    """
    digests = dict(more or {})
    for name, module in found.items():
        digests[name] = module.digest if scored else module.unscored
        for file, path in module.data.items():
            # kvbench's native sources are modules of their own
            data = None if below(name, ("kvbench",)) and _native(file) else modules.load(file, path)
            digests |= {} if data is None else {f"{name}:{file}": data.digest}
    if not digests:
        return None
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
