"""Checks that the configuration has the keys given on the command line, with hints for misspelled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from kvbench.cli.overrides import value
from kvbench.config.run_config import GROUPS, DecodingConfig
from kvbench.errors import ConfigError, nearest
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.schema import field_names, unknown


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
