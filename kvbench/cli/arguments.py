"""The options of ``python -m kvbench``, which may stand anywhere among the overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.errors import ConfigError, nearest

#: options without a value, by their names
SWITCHES = {
    "--help": "help",
    "-h": "help",
    "--hydra-help": "hydra_help",
    "--version": "version",
    "--multirun": "multirun",
    "-m": "multirun",
    "--run": "run",
    "-r": "run",
    "--resolve": "resolve",
}
#: options with a value, and what it may be (empty: anything)
VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "--cfg": ("cfg", ("job", "hydra", "all")),
    "-c": ("cfg", ("job", "hydra", "all")),
    "--package": ("package", ()),
    "-p": ("package", ()),
    "--config-dir": ("config_dir", ()),
    "-cd": ("config_dir", ()),
}
#: what ``--info`` may be followed by
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
#: Hydra's options that a run of kvbench has no use for, and what to type instead
REFUSED = {
    "--config-path": ("kvbench brings its configuration along", "--config-dir DIR adds choices to it"),
    "-cp": ("kvbench brings its configuration along", "--config-dir DIR adds choices to it"),
    "--config-name": ("kvbench brings its configuration along", "--config-dir DIR adds choices to it"),
    "-cn": ("kvbench brings its configuration along", "--config-dir DIR adds choices to it"),
    "--shell-completion": ("kvbench has no completion of its own", "python -m kvbench --help lists every choice"),
    "-sc": ("kvbench has no completion of its own", "python -m kvbench --help lists every choice"),
    "--experimental-rerun": ("kvbench goes on with a run by itself", "type the same command again"),
}


@dataclass
class Arguments:
    """A command line: its options, and its overrides in their order."""

    overrides: list[str] = field(default_factory=list)
    help: bool = False
    hydra_help: bool = False
    version: bool = False
    multirun: bool = False
    run: bool = False
    resolve: bool = False
    cfg: str | None = None
    package: str | None = None
    config_dir: str | None = None
    info: str | None = None

    def argv(self, overrides: Sequence[str]) -> list[str]:
        """The line as Hydra reads it: options before overrides."""
        words = []
        for switch in ("hydra_help", "multirun", "resolve"):
            words += [f"--{switch.replace('_', '-')}"] if getattr(self, switch) else []
        for name in ("cfg", "package", "config_dir"):
            words += [f"--{name.replace('_', '-')}", getattr(self, name)] if getattr(self, name) is not None else []
        words += ["--info", self.info] if self.info is not None else []
        return [*words, *overrides]


def parse(argv: Sequence[str]) -> Arguments:
    """The options and overrides of a command line.

    Raises:
        ConfigError: an option that does not exist, lacks its value, is given twice or does not go with another.
    """
    found = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            found.overrides += words
            break
        if not word.startswith("-") or word == "-":
            found.overrides.append(word)
            continue
        name, joined, value = word.partition("=")
        if name in REFUSED:
            problem, hint = REFUSED[name]
            raise ConfigError(name, None, problem, hint=hint)
        if name in SWITCHES:
            if joined:
                raise ConfigError(word, None, f"{name} takes no value", hint=name)
            setattr(found, SWITCHES[name], True)
        elif name in VALUES:
            _take(found, name, value if joined else words.pop(0) if words else None)
        elif name in ("--info", "-i"):
            found.info = value if joined else words.pop(0) if words and words[0] in INFO else "all"
            if found.info not in INFO:
                raise ConfigError("--info", found.info, "shows no such thing", allowed=INFO)
        else:
            raise _unknown(word, name)
    if (found.resolve or found.package is not None) and found.cfg is None:
        name = "--resolve" if found.resolve else "--package"
        raise ConfigError(name, None, "goes with --cfg", hint=f"--cfg job {name}")
    if found.multirun and (found.cfg or found.run):
        raise ConfigError(
            "--multirun",
            None,
            "a sweep has no single configuration to show" if found.cfg else "--run means one run",
            hint="leave one of the two out",
        )
    return found


def _take(found: Arguments, name: str, value: str | None) -> None:
    field, allowed = VALUES[name]
    if not value or (value.startswith("-") and value.lstrip("-")):
        example = f"{name} {allowed[0] if allowed else 'DIR' if field == 'config_dir' else 'GROUP'}"
        raise ConfigError(name, value or None, "an option lacks its value", allowed=allowed, hint=example)
    if allowed and value not in allowed:
        raise ConfigError(name, value, "shows no such thing", allowed=allowed)
    if getattr(found, field) is not None:
        raise ConfigError(name, value, f"is given twice, as {getattr(found, field)} and {value}", hint="give it once")
    setattr(found, field, value)


def _unknown(word: str, name: str) -> ConfigError:
    flags = sorted([*SWITCHES, *VALUES, "--info", "-i"])
    near = nearest(name, flags)
    bare = name.lstrip("-") or "KEY"
    hint = f"did you mean '{near}'?" if near else f"options of a run have no dashes: {bare}=..."
    return ConfigError(word, None, "no such option", allowed=", ".join(flags), hint=hint)
