"""The name, context length and chat template of a preset that loads another checkpoint.

``model=llama2-7b model.path=DIR`` runs the checkpoint in DIR, so its name, context length and chat template come from
DIR. Values that the user sets take precedence. If the checkpoint has the architecture of the preset, the preset's
prompt limit and dtype still apply, and so does its chat wrapper if the checkpoint also has a chat template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.models import checkpoint
from kvbench.models.gguf.convert import converted
from kvbench.models.gguf.place import is_gguf, label
from kvbench.models.locate import fetch_description
from kvbench.models.spec import BUNDLED, is_random, is_repository, local_folder
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
    """Replace a preset's values by those of the checkpoint, if the user points the preset to another checkpoint.

    The result is a copy of `model`, unchanged if it loads the preset's own checkpoint.

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
    folder = _folder(group)
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


def _folder(model: Mapping[str, Any]) -> Path | None:
    """Return a folder with the checkpoint's small files (`path`, or the hub's cache, fetched if necessary), or None."""
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
        return label(text)
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
    """Return True if two configurations agree in all keys of :data:`SAME` that both have, hidden_size included."""
    both = [key for key in SAME if numbers.get(key) is not None and other.get(key) is not None]
    return "hidden_size" in both and all(numbers[key] == other[key] for key in both)
