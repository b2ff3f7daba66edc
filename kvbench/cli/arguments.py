"""Parsing of the options of ``python -m kvbench``, which may appear anywhere among the overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.errors import ConfigError, nearest
from kvbench.util.confdir import config_groups

#: options without a value, and the attributes of :class:`Arguments` that they set
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
    "--with-fp16": "with_fp16",
}
#: options with a value: the attributes that they set, and the allowed values (empty: any)
VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "--cfg": ("cfg", ("job", "hydra", "all")),
    "-c": ("cfg", ("job", "hydra", "all")),
    "--package": ("package", ()),
    "-p": ("package", ()),
    "--config-dir": ("config_dir", ()),
    "-cd": ("config_dir", ()),
    "--resume": ("resume", ()),
}
#: values of ``--info``
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
#: options of Hydra that kvbench rejects, with the reason and what to type instead
REFUSED = {
    "--config-path": ("kvbench always uses its built-in configuration", "add choices to it with --config-dir DIR"),
    "-cp": ("kvbench always uses its built-in configuration", "add choices to it with --config-dir DIR"),
    "--config-name": ("kvbench always uses its built-in configuration", "add choices to it with --config-dir DIR"),
    "-cn": ("kvbench always uses its built-in configuration", "add choices to it with --config-dir DIR"),
    "--shell-completion": (
        "kvbench does not offer shell completion",
        "run python -m kvbench --help for a list of all choices",
    ),
    "-sc": ("kvbench does not offer shell completion", "run python -m kvbench --help for a list of all choices"),
    "--experimental-rerun": ("kvbench resumes a run by itself", "run the same command again, without this option"),
}


@dataclass
class Arguments:
    """The parsed command line of ``python -m kvbench``: options, and overrides (``KEY=VALUE``) in the given order."""

    overrides: list[str] = field(default_factory=list)
    help: bool = False
    hydra_help: bool = False
    version: bool = False
    multirun: bool = False
    run: bool = False
    resolve: bool = False
    with_fp16: bool = False
    resume: str | None = None
    cfg: str | None = None
    package: str | None = None
    config_dir: str | None = None
    info: str | None = None

    def argv(self, overrides: Sequence[str]) -> list[str]:
        """Return the arguments to pass to Hydra: the options that Hydra handles itself, then `overrides`."""
        words = []
        for switch in ("hydra_help", "multirun", "resolve"):
            words += [f"--{switch.replace('_', '-')}"] if getattr(self, switch) else []
        for name in ("cfg", "package", "config_dir"):
            words += [f"--{name.replace('_', '-')}", getattr(self, name)] if getattr(self, name) is not None else []
        words += ["--info", self.info] if self.info is not None else []
        return [*words, *overrides]


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line of ``python -m kvbench``, in which options and overrides may be mixed.

    Everything after ``--`` is an override.

    Raises:
        ConfigError: an option is unknown, lacks its value, is given twice, or conflicts with another.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            arguments.overrides += words
            break
        if not word.startswith("-") or word == "-":
            arguments.overrides.append(word)
            continue
        name, joined, value = word.partition("=")
        if name in REFUSED:
            problem, hint = REFUSED[name]
            raise ConfigError(name, None, problem, hint=hint)
        if name in SWITCHES:
            if joined:
                raise ConfigError(word, None, f"{name} does not take a value", hint=f"use just {name}")
            setattr(arguments, SWITCHES[name], True)
        elif name in VALUES:
            _take(arguments, name, value if joined else words.pop(0) if words else None)
        elif name in ("--info", "-i"):
            arguments.info = value if joined else words.pop(0) if words and words[0] in INFO else "all"
            if arguments.info not in INFO:
                raise ConfigError("--info", arguments.info, "is not a topic of --info", allowed=INFO)
        else:
            raise _unknown(word, name)
    if (arguments.resolve or arguments.package is not None) and arguments.cfg is None:
        name = "--resolve" if arguments.resolve else "--package"
        raise ConfigError(name, None, "can only be used together with --cfg", hint=f"--cfg job {name}")
    if arguments.with_fp16 and not arguments.multirun:
        raise ConfigError(
            "--with-fp16", None, "adds a run to a sweep, but this command is a single run", hint="add --multirun"
        )
    if arguments.resume is not None and len(argv) > (1 if f"--resume={arguments.resume}" in argv else 2):
        raise ConfigError(
            "--resume",
            arguments.resume,
            "continues a sweep with the command that started it, so nothing else can be set",
            hint=f"--resume {arguments.resume}",
        )
    if arguments.multirun and (arguments.cfg or arguments.run):
        raise ConfigError(
            "--multirun",
            None,
            "a sweep does not have a single configuration to show"
            if arguments.cfg
            else "contradicts --run, a single run",
            hint=f"leave out either --multirun or {'--cfg' if arguments.cfg else '--run'}",
        )
    return arguments


def _take(arguments: Arguments, name: str, value: str | None) -> None:
    field, allowed = VALUES[name]
    if not value or (value.startswith("-") and value.lstrip("-")):
        placeholder = {"config_dir": "DIR", "resume": "ID"}.get(field, "GROUP")
        example = f"{name} {allowed[0] if allowed else placeholder}"
        raise ConfigError(name, value or None, "this option needs a value", allowed=allowed, hint=example)
    if allowed and value not in allowed:
        raise ConfigError(name, value, "is not a value of this option", allowed=allowed)
    if getattr(arguments, field) is not None:
        both = f"{getattr(arguments, field)} and {value}"
        raise ConfigError(name, value, f"is given twice, as {both}", hint=f"give {name} only once")
    setattr(arguments, field, value)


def _unknown(word: str, name: str) -> ConfigError:
    flags = sorted([*SWITCHES, *VALUES, "--info", "-i"])
    bare = name.lstrip("-") or "KEY"
    near = None if bare.partition(".")[0] in config_groups() else nearest(name, flags)
    hint = f"did you mean '{near}'?" if near else f"write overrides without dashes: {bare}=VALUE"
    return ConfigError(word, None, "no such option", allowed=", ".join(flags), hint=hint)
