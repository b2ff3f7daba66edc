"""Checks of overrides that Hydra lacks, and conversion of Hydra's errors to ConfigError.

The configuration must have the keys given on the command line; misspelled ones get a hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from kvbench.config.run_config import GROUPS, DecodingConfig
from kvbench.errors import ConfigError, cut_text, nearest
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.schema import field_names, unknown

#: maximum length of a number in characters
LONGEST_NUMBER = 300


def is_hydras(override: Override) -> bool:
    """Return True if an override sets an option of Hydra itself, such as ``hydra.launcher.n_jobs=2``."""
    return override.key_or_group.startswith(("hydra.", "hydra/"))


def value(override: Override) -> str:
    """Return the value of an override as text; if it lists values for a sweep, the text after ``=`` as typed."""
    if override.is_sweep_override():
        return override_text(override)
    return "" if override.is_delete() and override.value() is None else override.get_value_element_as_str()


def override_text(override: Override) -> str:
    """Return the text after the first ``=`` of an override, as typed."""
    return (override.input_line or "").partition("=")[2]


def bracketed(text: str) -> str:
    """Add the brackets of a list to an override of ``method.layers`` without quotes; return others unchanged.

    The shell removes the quotes of ``method.layers="0-1:fp16,2-29:int4"``, which would then be a sweep over two values.
    """
    key, _, given = text.partition("=")
    return f"{key}=[{given}]" if key == "method.layers" and "," in given and given[0] not in "[{'\"" else text


def template(text: str) -> str:
    """Add the quotes that the shell has removed to an override of ``dataset.template``; return others unchanged.

    Hydra would read ``{question}`` as a dictionary, and a comma as a list for a sweep. A sweep lists quoted templates.
    """
    key, _, given = text.partition("=")
    if key != "dataset.template" or "{" not in given or given[0] in "'\"" or given.startswith(("choice(", "${")):
        return text
    escaped = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', given)
    return f'{key}="{escaped}"'


def check_hydras(override: Override, texts: Sequence[str], multirun: bool) -> None:
    """Raise ConfigError if an override sets an option of Hydra that kvbench does not let users set.

    A sweep may set two: ``hydra.sweep.dir``, the folder in which the sweep is recorded, and ``hydra.launcher.KEY`` if
    the launcher, which one of the overrides `texts` may choose, is not ``local``. All other options would have no
    effect or break the record of a run.
    """
    key, typed = override.key_or_group, override.input_line or ""
    launcher = next((word.partition("=")[2] for word in texts if word.startswith("launcher=")), "local")
    problem, hint = (
        "cannot be set, because kvbench configures Hydra itself",
        "",
    )
    if key == "hydra/launcher":
        hint = "launcher=joblib, launcher=submitit or launcher=ray"
    elif key == "hydra.searchpath":
        hint = "--config-dir DIR"
    elif key == "hydra.sweep.dir":
        named = override.value()
        if not multirun:
            problem, hint = (
                "is the folder of a sweep's record, but this command is a single run",
                "runtime.results_dir=DIR",
            )
        elif override.is_sweep_override() or not isinstance(named, (str, QuotedString)) or not str(named).strip("'\""):
            problem, hint = "must name exactly one folder", "hydra.sweep.dir=results/sweeps/mine"
        elif "${" in typed:
            problem, hint = "must be a plain path without ${...}", "hydra.sweep.dir=results/sweeps/mine"
        else:
            return
    elif key.startswith("hydra.launcher."):
        if not multirun or launcher == "local":
            problem, hint = (
                "is a setting of the launcher of a sweep",
                "add --multirun and launcher=joblib, launcher=submitit or launcher=ray",
            )
        elif key.endswith("._target_"):
            problem, hint = (
                "cannot be set, because launcher=NAME determines the class",
                "launcher=joblib, launcher=submitit or launcher=ray",
            )
        elif override.is_sweep_override():
            problem, hint = "must have one value for the whole sweep", f"{key}=VALUE"
        else:
            return
    raise ConfigError(
        typed or key,
        None,
        problem,
        allowed="hydra.sweep.dir=DIR with --multirun, hydra.launcher.KEY=VALUE with launcher=joblib, submitit or ray",
        hint=hint,
    )


def check_number(override: Override) -> None:
    """Raise ConfigError if an override contains a number that is too long or out of a float's range (``1e-400``)."""
    for word in override_text(override).strip("[]()").replace("choice(", "").split(","):
        typed = word.strip()
        if not re.fullmatch(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?", typed):
            continue
        digits = typed.lower().replace("_", "").partition("e")[0].strip("+-")
        number = float(typed.replace("_", ""))
        if len(typed) > LONGEST_NUMBER or math.isinf(number) or (not number and digits.strip("0.")):
            raise ConfigError(
                override.key_or_group,
                typed,
                "is too small, too large or too long for a number",
                hint="write a plain number",
            )


def check_repeats(overrides: Sequence[Override]) -> None:
    """Raise ConfigError if two overrides have the same key; Hydra would silently use the last value."""
    seen: dict[str, Override] = {}
    for override in overrides:
        key = override.key_or_group
        if key in seen:
            both = f"{value(seen[key])} and {value(override)}"
            raise ConfigError(key, value(override), f"is given twice, as {both}", hint=f"give {key}=... only once")
        seen[key] = override


def refuse_marks(text: str, override: Override) -> None:
    """Raise ConfigError if an override adds, removes or moves a key, because configurations have a fixed set of keys.

    In Hydra's grammar, ``+KEY`` adds a key, ``~KEY`` removes one, and ``KEY@PACKAGE`` moves one. Overrides of Hydra's
    own options are not checked.
    """
    key = override.key_or_group
    if is_hydras(override):
        return
    if override.is_delete():
        raise ConfigError(
            text, None, "keys cannot be removed from the configuration", hint=f"set another value: {key}=VALUE"
        )
    if override.is_add() or override.is_force_add():
        raise ConfigError(
            text, None, "keys cannot be added to the configuration", hint=f"remove the '+': {text.lstrip('+')}"
        )
    if override.package is not None:
        raise ConfigError(
            text, None, "a group cannot be moved to another place with '@'", hint=f"{key}={value(override)}"
        )


def explain(error: Exception, texts: Sequence[str]) -> ConfigError:
    """Convert an error of Hydra or OmegaConf to a ConfigError with the first line of its message and the overrides.

    Raises:
        KeyboardInterrupt: the error is what OmegaConf has made of an interruption.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__ or cause.__context__
    problem = cut_text(first_line(error))
    hint = "install the launcher's plugin: pip install 'kvbench[launch]'" if "hydra/launcher" in str(error) else ""
    return ConfigError(" ".join(texts) or "configuration", None, problem, hint=hint)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message without a final period; its class name if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


class Keys:
    """Checker of the keys that overrides set: raises ConfigError with a hint if the configuration lacks one.

    `groups` has the names of the choices of each configuration group.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], extra: Path | None) -> None:
        self.groups, self.extra = groups, extra

    def check_name(self, override: Override) -> None:
        """Raise ConfigError unless an override's key is a group (``method``) or begins with one (``method.KEY``).

        Whether the group has this KEY depends on the chosen method, so :meth:`check_path` checks it after composition.
        """
        key = override.key_or_group
        shown = value(override)
        if key in self.groups:
            return
        top, dot, rest = key.partition(".")
        if "/" in key:
            group, _, option = key.partition("/")
            if group in self.groups:
                near = nearest(option, self.groups[group])
                raise ConfigError(key, shown, "is not a group", hint=f"{group}={near or self.groups[group][0]}")
        if not dot and top in GROUPS:  # a group with keys but without choices, such as `decoding`
            raise ConfigError(
                key,
                shown,
                "is a group without named choices",
                hint=f"set single keys: {key}.KEY=VALUE; --help lists the keys of {key}",
            )
        if top in GROUPS and rest:
            return
        homes = self._homes(rest or key)
        near = nearest(top, self._names())
        if near and not dot and not homes:
            hint = f"did you mean '{near}'?"
        elif near and dot and (f"{near}.{rest.partition('.')[0]}" in self._homes(rest.partition(".")[0])):
            hint = f"did you mean '{near}.{rest}'?"
        else:
            hint = " or ".join(f"{home}={shown}" for home in homes)
        raise unknown(key, shown, f"no such group as '{top}'", self._names(), hint)

    def _names(self) -> list[str]:
        return sorted({*self.groups, *GROUPS})

    def _files(self, group: str) -> dict[str, Path]:
        return group_options(group, self.extra) if group in self.groups else {}

    def _homes(self, name: str, groups: Sequence[str] = GROUPS) -> list[str]:
        """Return ``GROUP.name`` for each group in which some choice has the key `name`."""
        homes = [f"decoding.{name}"] if "decoding" in groups and name in field_names(DecodingConfig) else []
        for group in groups:
            if any(name in read_choice(path) for path in self._files(group).values()):
                homes.append(f"{group}.{name}")
        return homes

    def check_path(self, config: Mapping[str, Any], override: Override, choices: str) -> None:
        """Raise ConfigError if an override sets a key that the composed configuration does not have.

        Setting a mapping of keys to ``{}`` is also an error, because it has no effect. The message shows the `choices`
        that the configuration was composed from, for example ``method=kivi``.
        """
        key, shown = override.key_or_group, value(override)
        node: Any = config
        path: list[str] = []
        for part in key.split("."):
            where = ".".join(path)
            if not isinstance(node, Mapping):
                problem = (
                    f"{where} is null and has no keys" if node is None else f"{where} is a single value and has no keys"
                )
                raise ConfigError(
                    key, shown, problem, hint=f"set {where} itself; --cfg job shows the whole configuration"
                )
            if part not in node:
                names = [str(name) for name in node if name not in ("_target_", "takes", "name")]
                hint = "" if nearest(part, names) else self._elsewhere(path, part, shown)
                with_choice = f" with {choices}" if choices else ""
                raise unknown(key, shown, f"no such key in {where}{with_choice}", names, hint)
            node = node[part]
            path.append(part)
        given = None if override.is_sweep_override() else override.value()
        if isinstance(node, Mapping) and node and isinstance(given, Mapping) and not given:
            raise ConfigError(
                key,
                shown,
                "has no effect: an empty mapping does not remove keys",
                hint=f"set single keys: {key}.{next(iter(node))}=...",
            )

    def _elsewhere(self, path: Sequence[str], part: str, shown: str) -> str:
        """Return a hint that another choice of the group, or another group, has a similar key; empty if none has."""
        if len(path) != 1:
            return ""
        group = path[0]
        keys = {choice: [str(key) for key in read_choice(file)] for choice, file in self._files(group).items()}
        near = nearest(part, {name for names in keys.values() for name in names})
        if near:
            having = " or ".join(f"{group}={choice}" for choice, names in keys.items() if near in names)
            return f"choose {having}, which has the key '{near}', and set {group}.{near}={shown}"
        homes = self._homes(part)
        return f"did you mean '{homes[0]}'?" if homes else ""
