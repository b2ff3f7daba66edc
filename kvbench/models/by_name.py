"""Models by name: the configuration group `model` for a preset, a repository on the hub, or a folder.

A preset that is pointed to another checkpoint takes the name, context length and chat template of this checkpoint.

``model=llama2-7b model.path=DIR`` runs the checkpoint in DIR, so its name, context length and chat template come from
DIR. Values that the user sets take precedence. If the checkpoint has the architecture of the preset, the preset's
prompt limit and dtype still apply, and so does its chat wrapper if the checkpoint also has a chat template.

Repositories and folders need no YAML file, because context length, dtype, chat template and kind of attention are read
from the checkpoint's files. Results then show the checkpoint's name. The presets in ``conf/model`` are for the models
of the papers, whose prompt limits and chat wrappers are not part of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError, few, nearest
from kvbench.models import checkpoint
from kvbench.models.gguf.convert import converted
from kvbench.models.gguf.place import ENDING, gguf_label, is_gguf
from kvbench.models.locate import Description, fetch_description
from kvbench.models.outliers import NONE, named
from kvbench.models.spec import BUNDLED, is_random, is_repository, local_folder, without_secrets
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.requirements import exists

__all__ = ["is_repository", "labelled"]

#: keys that must agree, where both have them, for a checkpoint to count as the preset's architecture
SAME = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
#: keys of a preset that apply only to its own checkpoint, and their values for others
ABOUT = {"licence": "", "gated": None, "requires": None, "note": "", "revision": None, "package": None}
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{7})[0-9a-f]*$")


def labelled(model: Mapping[str, Any], preset: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """Return a copy of `model`, corrected if the user points the preset to another checkpoint than its own.

    Values of the preset that need not hold for that checkpoint, such as name and context length, are then replaced by
    those of the checkpoint.

    Args:
        model: the configuration group `model` as composed by Hydra.
        preset: content of the preset in ``conf/model`` on which the group is based.
        given: keys of the group that the user set, such as ``{"path", "max_length"}``; their values are kept. A key
            whose value differs from the preset also counts as set by the user.

    Raises:
        ConfigError: the file system rejects the path; the checkpoint's ``config.json`` cannot be read or does not state
            the maximum sequence length; or random weights are requested and ``config.json`` is unavailable.
    """
    group = dict(model)
    own = {*given, *(key for key in group if group[key] != preset.get(key))}
    if group.get("hub_id") != preset.get("hub_id") and "path" not in own:
        group["path"] = None  # the preset's folder must not replace the repository that the user named
    if isinstance(group.get("path"), str) and not group["path"].startswith(BUNDLED):
        exists(group["path"], "model.path")
    elsewhere = group.get("path") is not None and not _same_folder(group["path"], preset.get("path"))
    repository = group.get("path") is None and group.get("hub_id") not in (None, preset.get("hub_id"))
    if not elsewhere and not repository:
        return dict(model)
    if elsewhere and "hub_id" not in own:
        group["hub_id"] = None
    for key, value in ABOUT.items():
        if key not in own and key in group:
            group[key] = value
    folder = _label_folder(group)
    if "name" not in own:
        group["name"] = _folder_name(group["path"]) if elsewhere else str(group["hub_id"])
    random = is_random(group.get("weights"))
    if folder is None and repository and random and is_repository(str(group["hub_id"])):
        raise ConfigError(
            "model.hub_id",
            group["hub_id"],
            "its config.json is neither on this machine nor available from the hub, so there is no "
            "architecture to fill "
            "with random weights",
            hint=(
                "set model.path=DIR to a folder with that config.json, or use a preset: "
                "model=llama2-7b model.weights=random"
            ),
        )
    if folder is None:  # not on this machine: loading fetches it or reports an error
        return group
    if repository and random:
        group["path"] = str(folder)
    try:
        numbers = checkpoint.read_config(folder)
        template, length = checkpoint.has_chat_template(folder), checkpoint.context(folder)
    except checkpoint.DamagedFile as damaged:
        key = "path" if elsewhere else "hub_id"
        raise ConfigError(f"model.{key}", group[key], f"its {damaged.file.name} {damaged.problem}") from damaged
    alike = _alike(numbers, _architecture(preset))
    if "max_length" not in own:
        if length is None:
            raise ConfigError(
                "model.max_length",
                None,
                f"the config.json of {group['name']} does not give the maximum number of tokens",
                hint="set it, for example model.max_length=4096",
            )
        group["max_length"] = length
    if "prompt_limit" not in own and not (alike and group["max_length"] == preset.get("max_length")):
        group["prompt_limit"] = None
    if "chat" not in own and not (alike and template == (preset.get("chat", "none") != "none")):
        group["chat"] = "template" if template else "none"
    if "dtype" not in own and not alike:
        group["dtype"] = "auto"
    if "architecture" not in own and not alike:
        group["architecture"] = None
    if alike and "preset" not in own and group["name"] != preset.get("name"):
        group["preset"] = preset.get("name")
    return group


def _label_folder(model: Mapping[str, Any]) -> Path | None:
    """Return a folder with the checkpoint's small files; None if there is none.

    It is the folder `path` or, for a repository, a folder in the hub's cache, to which the files are downloaded if
    necessary. A GGUF file is converted first.
    """
    if model.get("path") is not None:
        path = str(model["path"])
        folder = converted(Path(path).expanduser()) if _is_gguf_file(path) else local_folder(path)
        return folder if folder is not None and (folder / "config.json").is_file() else None
    if not is_repository(str(model["hub_id"])):  # refused by ModelConfig.check
        return None
    hub_id, revision = str(model["hub_id"]), model.get("revision")
    return checkpoint.snapshot(hub_id, revision) or fetch_description(hub_id, revision).folder


def _is_gguf_file(path: str) -> bool:
    return is_gguf(path) and Path(path).expanduser().is_file()


def _same_folder(path: Any, other: Any) -> bool:
    if not isinstance(path, str) or not isinstance(other, str):
        return False
    one, two = local_folder(path), local_folder(other)
    return path == other or (one is not None and two is not None and one.resolve() == two.resolve())


def _folder_name(path: Any) -> str:
    """Return the name of a folder; ``OWNER/NAME@COMMIT`` for a snapshot in the hub's cache."""
    text = str(path)
    if text.startswith(BUNDLED):
        return text.removeprefix(BUNDLED)
    if _is_gguf_file(text):
        return gguf_label(text)
    folder = Path(text).expanduser().absolute()
    match = _SNAPSHOT.search(folder.as_posix())
    return f"{match['owner']}/{match['name']}@{match['commit']}" if match else folder.resolve().name or text


def _architecture(preset: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of the preset's own checkpoint, as in ``config.json``; empty if they are unknown."""
    if preset.get("architecture"):
        return dict(preset["architecture"])
    folder = local_folder(preset.get("path"))
    return checkpoint.read_config(folder) if folder is not None and (folder / "config.json").is_file() else {}


def _alike(numbers: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two configurations have equal values of ``hidden_size`` and of all other keys in :data:`SAME`.

    A key that one of them lacks is not compared, except ``hidden_size``, which both must have.
    """
    both = [key for key in SAME if numbers.get(key) is not None and other.get(key) is not None]
    return "hidden_size" in both and all(numbers[key] == other[key] for key in both)


#: the `model` group for a checkpoint without a preset; :func:`complete_unlisted` fills in values from the checkpoint
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
#: the preset of a model behind a server, the only one that is no checkpoint
SERVED = "endpoint"
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


def check_model_name(name: Any, presets: Collection[str], listing: str = "", key: str = "model") -> None:
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
        hint = f"write only the repository's name: {_typed_name(key, address['id'])}"
    else:
        hint = f"did you mean '{near}'? " if near else ""
        names = f"{_typed_name(key, 'OWNER/NAME')} (hub) or {_typed_name(key, './FOLDER')}"
        hint += f"For a model without a preset, use {names}"
    raise ConfigError(key, shown, "no such model", allowed=presets, hint=hint, listing=listing)


def complete_unlisted(
    name: str, model: Mapping[str, Any], given: Collection[str], presets: Collection[str], key: str = "model"
) -> dict[str, Any]:
    """Complete the configuration group `model` for a repository or folder that has no preset.

    Name, context length and chat setting come from the checkpoint's files. The revision of a repository is set to the
    commit in the hub's cache, so that runs with weights of different commits have different ids. A folder that has the
    name of a preset is shown as ``PARENT/FOLDER``.

    Args:
        name: a repository or folder that passes :func:`check_model_name`.
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
        folder = _checkpoint_folder(name, source, group.get("revision"), presets, key)
        if source == "path" and "name" not in own and folder.resolve().name in presets:
            group["name"] = "/".join(folder.resolve().parts[-2:])
            own.add("name")
        if source == "hub_id" and group.get("revision") is None and _COMMIT.fullmatch(folder.name):
            group["revision"] = folder.name
            own.add("revision")
    return labelled(group, PLAIN, own)


def group(name: str, changes: Mapping[str, Any] | None = None, key: str = "model") -> dict[str, Any]:
    """Return the configuration group `model` for a preset, repository or folder, as plain data.

    `changes` are values that the user set, by key of the group; `key` is the option in messages, as in
    :func:`check_model_name`.

    Raises:
        ConfigError: the model does not exist, or its files cannot be read or lack necessary values.
    """
    presets, changes = group_options("model"), dict(changes or {})
    check_model_name(name, presets, key=key)
    if name == SERVED:
        raise ConfigError(key, name, "is a model behind a server, but this needs its weights", hint=f"{key}=NAME")
    if name in presets:
        preset = read_choice(presets[name])
        return named(labelled({**preset, **changes}, preset, set(changes)))
    return named(complete_unlisted(name, {**PLAIN, **changes}, set(changes), presets, key))


def _checkpoint_folder(name: str, source: str, revision: str | None, presets: Collection[str], key: str) -> Path:
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
        if is_gguf(name):
            there = sorted(other.name for other in file.parent.glob(f"*{ENDING}") if other.is_file())
            beside = f"; {file.parent} has {few(there, file.name)}" if there else f"; {file.parent} has none"
            remedy = f"name a GGUF file that exists, as in {_typed_name(key, f'./FILE{ENDING}')}{beside}"
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
        key,
        name,
        problem,
        allowed="the name of a preset, OWNER/NAME of the hub, ./FOLDER or ./FILE.gguf",
        hint=remedy + choices,
    )


def _near(name: str, presets: Collection[str], count: int = 3) -> list[str]:
    """Return up to `count` presets whose names are most similar to the last part of `name`."""
    last, others = name.rstrip("/").rpartition("/")[2].lower(), list(presets)
    ranking: list[str] = []
    while len(ranking) < count and (near := nearest(last, others)):
        ranking.append(near)
        others.remove(near)
    return ranking


def _typed_name(key: str, name: str) -> str:
    """Return `key` and `name` as they are typed on a command line: ``model=x`` or ``--model x``."""
    return f"{key} {name}" if key.startswith("--") else f"{key}={name}"
