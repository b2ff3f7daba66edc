"""A model on the command line that no YAML describes: a placeholder for Hydra, filled once it is composed.

Hydra composes choices from files alone. So a repository or folder after ``model=`` is stored as a choice in memory,
which holds nothing but the keys of the group (:data:`kvbench.models.by_name.PLAIN`); launchers hand it on to their
workers. :func:`filled` then puts in what the checkpoint's own files say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.errors import ConfigError
from kvbench.models import by_name
from kvbench.models.labels import labelled
from kvbench.util.confdir import conf_dir, options


def accept(choice: Any, presets: Sequence[str], listing: str, extra: Path | None = None) -> None:
    """Make a repository or folder a choice of Hydra's group `model`.

    Args:
        choice: as Hydra parsed it, quotes included.
        presets: names of the presets.
        listing: command that lists them.
        extra: the folder of ``--config-dir``, or None.

    Raises:
        ConfigError: `choice` is neither a preset, nor a repository, nor a folder; or Hydra would read it as the path of
            a preset's file (``./tiny``).
    """
    name = choice.strip("'\"") if isinstance(choice, str) else choice
    by_name.check(name, presets, listing)
    if name in presets:
        return
    for folder in filter(None, (conf_dir(), extra)):
        if (folder / "model" / f"{name}.yaml").is_file() and not name.startswith("/"):
            full = Path(name).absolute()
            raise ConfigError("model", name, "is the path of a preset's file too", hint=f"the full path: model={full}")
    parts = [part for part in name.split("/") if part]  # Hydra's store has no empty parts: of /a/b it looks up a/b
    ConfigStore.instance().store(
        group="/".join(["model", *parts[:-1]]), name=parts[-1], node=dict(by_name.PLAIN), package="model"
    )


def filled(config: DictConfig, choice: str | None, texts: Sequence[str], extra: Path | None = None) -> DictConfig:
    """Return the configuration with a model's name, context and chat as of the checkpoint that it loads.

    Args:
        config: as Hydra composed it; its `model` group is changed.
        choice: preset, repository or folder of the `model` group.
        texts: the overrides.
        extra: the folder of ``--config-dir``, or None.

    Raises:
        ConfigError: there is no such checkpoint, or its config.json cannot be read.
    """
    presets = options("model", extra)
    model = config.get("model")
    if choice is None or not isinstance(model, DictConfig):
        return config
    try:
        plain = OmegaConf.to_container(model, resolve=True)
    except OmegaConfBaseException:  # refused by to_plain, with the key
        return config
    assert isinstance(plain, dict)
    group = {str(key): value for key, value in plain.items()}
    keys = {text.split("=", 1)[0].partition("model.")[2] for text in texts if text.startswith("model.")}
    if choice in presets:
        preset = yaml.safe_load(presets[choice].read_text(encoding="utf-8"))
        checked = labelled(group, preset if isinstance(preset, dict) else {}, keys)
    else:
        checked = by_name.described(choice, group, keys, presets)
    with open_dict(config):
        config["model"] = checked
    return config
