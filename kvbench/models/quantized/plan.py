"""Choice of the layers of a checkpoint that get 4-bit weights, from its files and the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import CombinationError, ModelError
from kvbench.models.checkpoint import snapshot, weight_files
from kvbench.models.locate import Source
from kvbench.models.quantized.files import Tensors, check_types
from kvbench.models.quantized.formats import format_of, stored, unreadable
from kvbench.models.spec import ModelConfig

if TYPE_CHECKING:
    from kvbench.models.quantized.loading import Plan


def plan_of(model: ModelConfig, source: Source, config: Any) -> Plan | None:
    """Return the plan for loading a checkpoint with 4-bit weights; None if transformers loads all of its weights.

    The checkpoint must be on this machine; `config` is transformers' config of it.

    Raises:
        ModelError: the format of the checkpoint is refused, its weights are quantized already and are to be rounded, or
            they are quantized and ``config.json`` does not say how (DamagedFile).
    """
    description = stored(vars(config))
    layout = format_of(description)
    if reason := unreadable(description):
        raise ModelError(f"model {model.name}: {source.name} cannot be loaded: {reason}")
    if description is None:
        for file in _local_weight_files(source):
            check_types(file)
    if layout is None and model.rounding is None:
        return None
    if description is not None and model.rounding is not None:
        raise ModelError(
            f"model {model.name}: model.weights={model.weights} rounds weights in full precision, but those of "
            f"{source.name} are already quantized.\n  hint: set model.weights=pretrained"
        )
    from kvbench.models.quantized.loading import Plan

    files = safetensors(source)
    if layout is not None and not files:
        raise ModelError(
            f"model {model.name}: {source.name} has {layout.method.upper()} weights that are not in safetensors files."
            "\n  hint: choose a checkpoint in the safetensors format"
        )
    return Plan(Tensors(files) if files else None, layout, model.rounding)


def check_whole(model: ModelConfig, split: bool) -> None:
    """Raise ConfigError if 4-bit weights would be split over processes (``runtime.tensor_parallel``)."""
    if split:
        raise CombinationError(
            "runtime.tensor_parallel",
            "auto",
            f"cannot split 4-bit weights over processes (model {model.name}, model.weights={model.weights})",
            hint="set runtime.tensor_parallel=null, or use the unquantized checkpoint with model.weights=pretrained",
        )


def safetensors(source: Source) -> list[Path]:
    """Return the weight files of a checkpoint on this machine; an empty list if they are not safetensors files."""
    files = _local_weight_files(source)
    return files if all(file.suffix == ".safetensors" for file in files) else []


def _local_weight_files(source: Source) -> list[Path]:
    """Return the weight files of a checkpoint on this machine."""
    name = str(source.name)
    folder = Path(name) if Path(name).is_dir() else snapshot(name, source.revision)
    return list(weight_files(folder)) if folder is not None else []
