"""The command line that starts a stored run again, derived from the configuration in its `config.yaml`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from kvbench.config.setting import written
from kvbench.models.by_name import SERVED
from kvbench.models.outliers import base_name
from kvbench.results.identity import method_name
from kvbench.util.confdir import conf_dir, group_options, read_choice

#: keys that the choice of a group determines, or that do not change what a run does
_IMPLIED = {
    "model": ("name", "hub_id", "revision", "path", "licence", "gated", "requires", "note", "architecture", "preset"),
    "method": ("_target_", "takes", "preset"),
    "quantizer": ("name",),
    "dataset": ("_target_", "name"),
    "decoding": (),
    "runtime": ("rerun", "mix_code", "retry"),
}
#: keys that an own model, one without a preset, takes from its checkpoint
_READ = ("dtype", "max_length", "prompt_limit", "chat")


def command(config: Mapping[str, Any], program: str = "python -m kvbench") -> str:
    """Return a command line, which begins with `program`, that repeats a stored run, quoted for a shell.

    It contains the choices of the run's `config.yaml` and those options that differ from the presets; missing groups
    are left out. If the run's method or data set came from a folder given by ``--config-dir``, the command contains
    ``--config-dir DIR``, where DIR is a placeholder because the folder is not stored with a run.
    """
    words = [word for group in _implied_groups(config) for word in _group_overrides(group, config)]
    folder = ["--config-dir", "DIR"] if any(_foreign(group, config) for group in ("method", "dataset")) else []
    return " ".join([program, *(shlex.quote(word) for word in (*folder, *words))])


def changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a run's `config.yaml` that differ from its presets, by dotted key.

    Missing groups are left out.
    """
    return {key: value for group in _implied_groups(config) for key, value in _changes(group, config)}


def _implied_groups(config: Mapping[str, Any]) -> list[str]:
    return [group for group in _IMPLIED if isinstance(config.get(group), Mapping)]


def _group_overrides(group: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the overrides of one group: its choice, then the keys that differ from the choice's file."""
    choice = _choice(group, config)
    if choice is not None and not (group == "quantizer" and choice == _default_quantizer(config)):
        yield f"{group}={written(choice)}"
    for key, value in _changes(group, config):
        yield f"{key}={written(value)}"


def _changes(group: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of one group that differ from the file of its choice, with their values."""
    choice, left_out = _choice(group, config), _IMPLIED[group]
    if group == "decoding":
        standard = _file("config").get("decoding", {})
    else:
        standard = _choice_content(group, "default" if group == "runtime" else choice)
    if group == "method":  # what every method has
        standard = {**_file("config").get("method", {}), **standard}
    if group == "model" and choice == SERVED:  # the description is that of the preset, which is named
        described = _choice_content("model", config[group].get("preset"))
        standard, left_out = {**standard, **described, "preset": None}, ("name", "note")
    elif group == "model" and choice not in _choices("model"):
        standard, left_out = _PLAIN, (*left_out, *_READ)
    for key, value in _changed(standard, {k: v for k, v in config[group].items() if k not in left_out}):
        yield f"{group}.{key}", value


#: keys of a model without a preset
_PLAIN: dict[str, Any] = {"weights": "pretrained", "trust_remote_code": False, "outliers": "none"}


def _choice(group: str, config: Mapping[str, Any]) -> str | None:
    """Return the name of a group's choice; None for groups without one."""
    values = config[group]
    if group == "model":
        if "urls" in values:
            return SERVED
        path = values.get("path")
        name = base_name(str(values.get("preset") or values.get("name") or ""))
        if isinstance(name, str) and name in _choices("model"):
            return name
        return str(values.get("hub_id") or path or name)
    if group == "method":
        return method_name(config)
    if group == "quantizer":
        return str(values.get("name") or "none").partition("+")[0]
    if group == "dataset":
        return str(values.get("name"))
    return None


def _foreign(group: str, config: Mapping[str, Any]) -> bool:
    """Return True if the choice of a group is not one of those in the package's ``conf`` folder."""
    return isinstance(config.get(group), Mapping) and _choice(group, config) not in _choices(group)


def _default_quantizer(config: Mapping[str, Any]) -> str:
    """Return the quantizer that ``method=NAME`` chooses by itself."""
    method = _choice_content("method", _choice("method", config) if isinstance(config.get("method"), Mapping) else None)
    for default in method.get("defaults", ()):
        for key, name in default.items() if isinstance(default, dict) else ():
            if "quantizer" in key:
                return str(name)
    return "none"


def _changed(standard: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys, with their values, in which `values` differ from a preset's."""
    for key, value in values.items():
        other = standard.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping) and set(value) <= set(other):
            yield from _changed(other, value, f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key}", value


def _choice_content(group: str, choice: str | None) -> dict[str, Any]:
    """Return the content of a choice's file; empty if there is none."""
    return _file(f"{group}/{choice}") if choice in _choices(group) else {}


@cache
def _choices(group: str) -> frozenset[str]:
    return frozenset(group_options(group))


@cache
def _file(name: str) -> dict[str, Any]:
    return read_choice(conf_dir() / f"{name}.yaml")
