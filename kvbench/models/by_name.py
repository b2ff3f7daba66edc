"""Models by name: the configuration group `model` for a preset, a repository on the hub, or a folder.

Repositories and folders need no YAML file, because context length, dtype, chat template and kind of attention are read
from the checkpoint's files. Results then show the checkpoint's name. The presets in ``conf/model`` are for the models
of the papers, whose prompt limits and chat wrappers are not part of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError, nearest
from kvbench.models import checkpoint
from kvbench.models.gguf.convert import converted
from kvbench.models.gguf.place import is_gguf
from kvbench.models.labels import labelled
from kvbench.models.locate import Description, fetch_description
from kvbench.models.outliers import NONE, named
from kvbench.models.spec import is_repository, local_folder, without_secrets
from kvbench.util.confdir import options, read_choice
from kvbench.util.requirements import exists

#: the `model` group for a checkpoint without a preset; :func:`described` fills in values from the checkpoint
PLAIN: Mapping[str, Any] = {
    "name": "",
    "hub_id": None,
    "revision": None,
    "path": None,
    "weights": "pretrained",
    "dtype": "auto",
    "max_length": None,
    "prompt_limit": None,
    "chat": "none",
    "trust_remote_code": False,
    "licence": "",
    "gated": None,
    "requires": None,
    "note": "",
    "architecture": None,
    "outliers": NONE,
}
#: a full commit hash, the name of a snapshot's folder in the hub's cache
_COMMIT = re.compile(r"[0-9a-f]{40}")


def source_key(name: str) -> Literal["path", "hub_id"] | None:
    """Return the configuration key for a model's name: ``path`` if it is a folder, ``hub_id`` if it is a repository.

    A folder with a ``config.json`` takes precedence over a repository of the same name on the hub, as in transformers.
    None if the name can be neither.

    Raises:
        ConfigError: the file system rejects the name as a path.
    """
    if not name.strip() or "${" in name or "://" in name:
        return None
    exists(name, "model")
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or is_gguf(name) or (folder / "config.json").is_file():
        return "path"
    if "/" in name and is_repository(name):
        return "hub_id"
    return "path" if folder.is_dir() or "/" in name else None


def check(name: Any, presets: Collection[str], listing: str = "", key: str = "model") -> None:
    """Raise ConfigError unless a model's name is a preset, or is written like a repository or folder.

    Whether the repository or folder exists is not checked here. The message names `listing`, a command that lists the
    presets, and `key`, the option, for example ``--model``.
    """
    if isinstance(name, str) and (name in presets or source_key(name)):
        return
    shown = "null" if name is None else without_secrets(str(name))
    near = nearest(shown, presets)
    address = re.search(r"://[^/\s]*/(?P<id>[\w.-]+/[\w.-]+)$", shown)
    if address:
        hint = f"write only the repository's name: {_typed(key, address['id'])}"
    else:
        hint = f"did you mean '{near}'? " if near else ""
        hint += f"For a model without a preset, use {_typed(key, 'OWNER/NAME')} (hub) or {_typed(key, './FOLDER')}"
    raise ConfigError(key, shown, "no such model", allowed=presets, hint=hint, listing=listing)


def described(
    name: str, model: Mapping[str, Any], given: Collection[str], presets: Collection[str], key: str = "model"
) -> dict[str, Any]:
    """Complete the configuration group `model` for a repository or folder that has no preset.

    Name, context length and chat setting come from the checkpoint's files. The revision of a repository is set to the
    commit in the hub's cache, so that runs with weights of different commits have different ids. A folder that has the
    name of a preset is shown as ``PARENT/FOLDER``.

    Args:
        name: a repository or folder that passes :func:`check`.
        model: the default values of the group (:data:`PLAIN`), overwritten by those that the user set.
        given: keys of the group that the user set. Their values are kept. If ``path`` or ``hub_id`` is one of them, it
            is used in place of `name`.

    Raises:
        ConfigError: the folder does not exist, the repository is neither on this machine nor available on the hub, or
            the ``config.json`` cannot be read or does not state the maximum sequence length.
    """
    own, group = set(given), dict(model)
    if not any(group.get(source) for source in ("path", "hub_id") if source in own):
        source = source_key(name)
        assert source is not None
        group[source] = name
        own.add(source)
        folder = _folder(name, source, group.get("revision"), presets, key)
        if source == "path" and "name" not in own and folder.resolve().name in presets:
            group["name"] = "/".join(folder.resolve().parts[-2:])
            own.add("name")
        if source == "hub_id" and group.get("revision") is None and _COMMIT.fullmatch(folder.name):
            group["revision"] = folder.name
            own.add("revision")
    return labelled(group, PLAIN, own)


def group(name: str, changes: Mapping[str, Any] | None = None, key: str = "model") -> dict[str, Any]:
    """Return the configuration group `model` for a preset, repository or folder, as plain data.

    `changes` are values that the user set, by key of the group; `key` is the option in messages, as in :func:`check`.

    Raises:
        ConfigError: the model does not exist, or its files cannot be read or lack necessary values.
    """
    presets, changes = options("model"), dict(changes or {})
    check(name, presets, key=key)
    if name in presets:
        preset = read_choice(presets[name])
        return named(labelled({**preset, **changes}, preset, set(changes)))
    return named(described(name, {**PLAIN, **changes}, set(changes), presets, key))


def _folder(name: str, source: str, revision: str | None, presets: Collection[str], key: str) -> Path:
    """Return a folder with the checkpoint's small files; fetch them from the hub if necessary. Raises ConfigError."""
    if source == "path":
        folder = local_folder(name)
        assert folder is not None
        file = Path(name).expanduser()
        if is_gguf(name) and file.is_file():
            return converted(file)
        if (folder / "config.json").is_file():
            return folder
        problem = "has no config.json, so it is not a checkpoint" if folder.is_dir() else "does not exist"
        remedy = "name a folder with config.json, *.safetensors and tokenizer files"
    else:
        cached = checkpoint.snapshot(name, revision)
        description = Description(cached) if cached else fetch_description(name, revision)
        if description.folder is not None:
            return description.folder
        problem = f"is not on this machine, and {description.problem}"
        if Path(name).is_dir():
            problem += f"; the folder ./{name} has no config.json"
        remedy = f"run python -m kvbench.fetch model={name} on a machine with network and copy its HF_HOME here"
    near = _near(name, presets)
    choices = f"; or choose a preset: {', '.join(near)}" if near else ""
    raise ConfigError(
        key, name, problem, allowed="the name of a preset, OWNER/NAME of the hub, or ./FOLDER", hint=remedy + choices
    )


def _near(name: str, presets: Collection[str], count: int = 3) -> list[str]:
    """Return up to `count` presets whose names are most similar to the last part of `name`."""
    last, others = name.rstrip("/").rpartition("/")[2].lower(), list(presets)
    ranking: list[str] = []
    while len(ranking) < count and (near := nearest(last, others)):
        ranking.append(near)
        others.remove(near)
    return ranking


def _typed(key: str, name: str) -> str:
    """Return `key` and `name` as they are typed on a command line: ``model=x`` or ``--model x``."""
    return f"{key} {name}" if key.startswith("--") else f"{key}={name}"
