"""Digests of the code on which a run's outputs depend, one per part (method, quantizer, task, ...).

The modules are found by following imports, beginning with the modules that run batches, the method's module and the
data set's module. So an edit of any module that a run may execute changes a digest, without a list kept by hand.
Comments, docstrings, formatting, the folder and the version of Python do not affect a digest. The user's own code is
treated like kvbench's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.results import code as codes
from kvbench.results.code import Code
from kvbench.runner import modules
from kvbench.runner.modules import NATIVE, Module, below, own
from kvbench.util.confdir import group_options, read_choice

#: hexadecimal digits of a digest
DIGITS = 12

#: the module that runs a batch of samples; all that it imports serves every run
ROOTS = ("kvbench.runner.session",)
#: the module that chooses samples, and records them
RECORDING = "kvbench.runner.run"
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
#: options that name further code: another choice of the group, or a class of the user's
NAMED = {"method": ("draft", "press"), "dataset": ("over",)}
#: parts that only some rows used (:func:`kvbench.results.code.used`), and the modules through which they are reached
OPTIONAL = {
    codes.STEPS: tuple(f"kvbench.decoding.{name}" for name in ("compiled", "graphs", "recorded", "rounds")),
    codes.POINTS: ("kvbench.runner.points",),
    codes.FIDELITY: ("kvbench.runner.fidelity_samples",),
    codes.SHARED: ("kvbench.runner.shared_runs",),
    codes.SERVED: ("kvbench.runner.served", "kvbench.endpoint"),
}
#: parts that are not named for their package
_NAMES = {"methods": "method", "models": "model"}

#: packages that a method or a data set does not add to what runs share
_BESIDE = ("kvbench.config", "kvbench.runner")

_FORMATS, _QUANTIZERS = "kvbench.cache.segments", "kvbench.quantizers"
_METRICS, _TASKS = "kvbench.metrics", "kvbench.tasks"


#: modules by name, of each part of the code
Parts = dict[str, dict[str, Module]]


def code(config: Mapping[str, Any]) -> Code:
    """Return the digest of each part of the source code on which the outputs of a run depend (:func:`parts`).

    A digest is None if the part has no source file. The storage dtype is included as if it were a part.
    """
    return {**_digests(parts(config)), **codes.storage_now(config)}


def shared_code() -> Code:
    """Return the digests of the parts of kvbench's code that all methods and data sets use."""
    return _digests(_Package().shared())


def parts(config: Mapping[str, Any]) -> Parts:
    """Return the modules on which the outputs of a run depend, by part of the code.

    The run's own parts are ``method`` (kvbench's methods, and the user's modules that the method's class needs),
    ``task`` (modules that the data set needs, without scoring), ``scorer`` (scoring), and ``quantizer`` (all of
    kvbench's quantizers, if the run has one).

    All runs share the others: a part for each package (``cache``, ``attention``, ...) with the code that may run on a
    CPU, one for the kernels of each package (``cache/kernels``), one for each family of attention kernels
    (``attention/cuda``), and those of :data:`OPTIONAL`. A row records a part with a slash only if it used it.

    Of `config`, only the classes of `method` and `dataset` matter (:func:`targets`), and whether there is a quantizer.
    """
    quantizer = (config.get("quantizer") or {}).get("name") not in (None, "none")
    package = _Package()
    return {**package.method(targets(config, "method"), quantizer), **package.task(targets(config, "dataset"))}


def targets(config: Mapping[str, Any], group: str) -> tuple[str, ...]:
    """Return the class of a configuration's method or data set, and further classes that its options name.

    The options are those of :data:`NAMED`: ``dataset.over=gsm8k``, ``method.draft=kivi``, ``method.press=mine.Press``.
    """
    found = [str(config[group].get("_target_") or "")]
    for value in filter(None, (config[group].get(key) for key in NAMED[group])):
        choice = group_options(group).get(str(value))
        target = str(value if choice is None else read_choice(choice).get("_target_"))
        if below(target, ("kvbench",)) or own(target.rpartition(".")[0]):
            found.append(target)
    return tuple(found)


class _Package:
    """kvbench's source files as they are now, and which of them every run may execute.

    Attributes:
        files: the files of modules and native sources by name (:func:`kvbench.runner.modules.package_files`).
        native: names of the native sources.
        families: the parts that are families of attention kernels: the folders of `kvbench/attention/` with a module
            ``decode`` or native sources. A step uses the kernels of one family.
        optional: for each part that only some rows use, the modules or packages with which its imports begin.
        base: modules that every run may execute, on a CPU too.
        kernels: modules that those of `base` import only on a GPU.
    """

    def __init__(self) -> None:
        self.files = modules.package_files("kvbench")
        self.native = {name for name, path in self.files.items() if path.suffix in NATIVE}
        inside = [(name, name.split(".", 3)) for name in self.files if name.startswith("kvbench.attention.")]
        self.families = {
            f"attention/{parts[2]}"
            for name, parts in inside
            if parts[3:] == ["decode"] or (parts[3:] and name in self.native)
        }
        self.optional = {part: (f"kvbench.{part.replace('/', '.')}",) for part in self.families} | OPTIONAL
        self.base: dict[str, Module] = {}
        found = modules.reached(ROOTS, self._outside(CHOSEN), self._place)
        self.kernels = {name for name, module in found.items() if module.kernel}
        self.base = _without(found, self.kernels)

    def shared(self) -> Parts:
        """Return the parts that all runs share."""
        found: Parts = {}
        for name, module in self.base.items():
            package = name.split(".")[1]
            found.setdefault(_NAMES.get(package, package), {})[name] = module
        roots = {part: [name for name in self.files if below(name, names)] for part, names in self.optional.items()}
        for name in self.kernels | self.native:
            roots.setdefault(self._home(name), []).append(name)
        return found | {part: self._reached_by(part, names) for part, names in roots.items()}

    def method(self, classes: Sequence[str], quantized: bool) -> Parts:
        """Return the parts ``method`` and ``quantizer``, and those that all runs share; `classes` are :func:`targets`.

        Kernels that only this method uses are included in the kernels of their packages.
        """
        found, home = self._needed(classes, (_TASKS,)), classes[0].rpartition(".")[0]
        self.kernels |= {name for name, module in found.items() if module.kernel}
        quantizers = {
            name: module
            for name, module in found.items()
            if below(name, (_QUANTIZERS,)) or (module.quantizer and name != home and own(name))
        }
        rest = _without(found, self.kernels | quantizers.keys())
        # formats that the method names, such as KVQuant's, quantize by themselves
        formats = modules.reached(found, lambda name: below(name, (_FORMATS,)), self._place)
        used = {name for module in formats.values() for name in module.imports if below(name, (_QUANTIZERS,))}
        quantizers |= modules.reached(used, lambda name: below(name, (_QUANTIZERS,)), self._place)
        if found or home in self.base:
            rest |= {name: module for name, module in self.base.items() if below(name, ("kvbench.methods",))}
        if quantized:
            names = [name for name in self.files if below(name, (_QUANTIZERS,))]
            quantizers |= modules.reached(names, lambda name: False, self._place)
        return {**self.shared(), "method": rest, "quantizer": quantizers}

    def task(self, classes: Sequence[str]) -> Parts:
        """Return the parts ``task`` and ``scorer`` of a data set; `classes` are its :func:`targets`.

        They are separate because an edited scorer needs no new predictions: stored ones are scored again.
        """
        others = [package for package in CHOSEN if package != _TASKS]
        found = self._needed(classes, ("kvbench.methods", *others, _METRICS))
        metrics = {name for module in found.values() for name in module.imports if below(name, (_METRICS,))}
        scorers = modules.reached([SCORING, *metrics], lambda name: below(name, (_METRICS,)), self._place)
        scorers |= {f"{name}:score": Module(module.scorer, "") for name, module in found.items() if module.scorer}
        return {"task": _unscored(found), codes.SCORER: scorers if found else {}}

    def _needed(self, classes: Sequence[str], closed: tuple[str, ...]) -> dict[str, Module]:
        """Return the modules of classes and all that they import, without the base.

        Imports are followed into the user's modules, modules of a class's own top-level package, and modules of kvbench
        that are not in `closed`.
        """
        tops, inside = {name.partition(".")[0] for name in classes}, self._outside((*_BESIDE, *closed))

        def enters(name: str) -> bool:
            if below(name, ("kvbench",)):
                return inside(name)
            return below(name, tops) or own(name) or own(name.rpartition(".")[0])  # a module, or what it holds

        return modules.reached(filter(None, classes), enters, self._place)

    def _outside(self, closed: tuple[str, ...], part: str = "") -> Callable[[str], bool]:
        """Return a predicate for modules of kvbench that are neither in the base nor in `closed`, nor optional.

        It is also True for the modules of the optional `part`; families of kernels may use each other's modules.
        """
        mine = self.families if part in self.families else {part}
        others = [name for other, names in self.optional.items() if other not in mine for name in names]
        shut = tuple(f"{name}." for name in (*LEFT_OUT, *closed, *others, SCORING))
        return lambda name: name.startswith("kvbench.") and name not in self.base and not f"{name}.".startswith(shut)

    def _place(self, name: str) -> Path | None:
        return self.files.get(name) if below(name, ("kvbench",)) else modules.module_file(name)

    def _reached_by(self, part: str, names: Iterable[str]) -> dict[str, Module]:
        """Return the modules and native sources of an optional part and all that they import, without the base.

        If a module of a family of kernels is among them, all native sources of this family are included.
        """
        found = modules.reached(names, self._outside((_QUANTIZERS, RECORDING), part), self._place, kernels=True)
        homes = {self._home(name) for name in found} & self.families
        native = [name for name in self.native if self._home(name) in homes]
        return _unscored(found) | modules.reached(native, lambda name: False, self._place)

    def _home(self, name: str) -> str:
        """Return the part to which a kernel's source belongs: its family of attention, or its package's kernels."""
        _, package, *inside = name.split(".")
        family = f"{package}/{''.join(inside[:1])}"
        return family if family in self.families else f"{package}/kernels"


def _without(found: Mapping[str, Module], others: Collection[str]) -> dict[str, Module]:
    return {name: module for name, module in found.items() if name not in others}


def _unscored(found: Mapping[str, Module]) -> dict[str, Module]:
    return {name: replace(module, digest=module.unscored) for name, module in found.items()}


def _digests(parts: Parts) -> Code:
    return {part: _digest(found) for part, found in parts.items()}


def _digest(found: Mapping[str, Module]) -> str | None:
    """Return one digest over modules and their data files, or None if there are none."""
    digests = {name: module.digest for name, module in found.items()}
    for name, module in found.items():
        for file, path in module.data.items():
            # kvbench's native sources have entries of their own
            of_kernels = below(name, ("kvbench",)) and path.suffix in NATIVE
            data = None if of_kernels else modules.load(file, path)
            digests |= {} if data is None else {f"{name}:{file}": data.digest}
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if digests else None
