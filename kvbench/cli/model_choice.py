"""Models on the command line without a YAML file: placeholders for Hydra, filled after composition.

Hydra accepts only choices that it can look up. A repository or folder after ``model=`` is therefore registered in
memory as a choice with the default keys of the group (:data:`kvbench.models.by_name.PLAIN`); launchers pass it on to
their workers. After composition, :func:`fill_from_checkpoint` adds the values from the checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.errors import ConfigError
from kvbench.models import by_name
from kvbench.models.by_name import labelled
from kvbench.models.endpoint_config import KEYS, described
from kvbench.models.outliers import named
from kvbench.util.confdir import conf_dir, group_options, read_choice


def accept(choice: Any, presets: Sequence[str], listing: str, extra: Path | None = None) -> None:
    """Make Hydra accept a hub repository or a folder after ``model=``; do nothing if a preset is given.

    Args:
        choice: the value of ``model=`` as parsed by Hydra, including any quotes.
        listing: command that lists the presets, for error messages.

    Raises:
        ConfigError: `choice` is not a preset, a repository or a folder. Or it is a folder such as ``./tiny`` that Hydra
            would confuse with the file of a preset.
    """
    name = choice.strip("'\"") if isinstance(choice, str) else choice
    by_name.check_model_name(name, presets, listing)
    if name in presets:
        return
    for folder in filter(None, (conf_dir(), extra)):
        if (folder / "model" / f"{name}.yaml").is_file() and not name.startswith("/"):
            full = Path(name).absolute()
            raise ConfigError(
                "model", name, "is also the path of a preset's file", hint=f"write the full path: model={full}"
            )
    parts = [part for part in name.split("/") if part]  # Hydra's store has no empty parts: it looks up /a/b as a/b
    ConfigStore.instance().store(
        group="/".join(["model", *parts[:-1]]), name=parts[-1], node=dict(by_name.PLAIN), package="model"
    )


def fill_from_checkpoint(
    config: DictConfig, choice: str | None, texts: Sequence[str], extra: Path | None = None
) -> DictConfig:
    """Set the model's name, context length and chat setting from its checkpoint, and return the configuration.

    Values that the user has set in the overrides `texts` are kept. Nothing changes if `choice`, the value of
    ``model=``, is a preset that loads its own checkpoint, or None. The `model` group of the given configuration is
    replaced.

    Raises:
        ConfigError: there is no such checkpoint, or its config.json cannot be read.
    """
    presets = group_options("model", extra)
    model = config.get("model")
    if choice is None or not isinstance(model, DictConfig):
        return config
    try:
        plain = OmegaConf.to_container(model, resolve=True)
    except OmegaConfBaseException:  # to_plain raises an error that names the key
        return config
    assert isinstance(plain, dict)
    group = {str(key): value for key, value in plain.items()}
    keys = {text.split("=", 1)[0].partition("model.")[2] for text in texts if text.startswith("model.")}
    if choice in presets:
        preset = read_choice(presets[choice])
        served = KEYS & preset.keys()
        checked = described(group, preset, presets, keys) if served else labelled(group, preset, keys)
    else:
        checked = by_name.complete_unlisted(choice, group, keys, presets)
    with open_dict(config):
        config["model"] = named(checked)
    return config
