"""The two forms of a run's configuration: the data hashed into the run id, and the configuration that is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.methods.load import true_name
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.results.identity import identity, short_name
from kvbench.tasks.base import Task
from kvbench.util.progress import say


def material(config: Mapping[str, Any], checked: RunConfig, task: Task) -> dict[str, Any]:
    """Return the JSON data that determines the outputs of a run; the run id is a hash of it.

    See :func:`kvbench.results.identity.identity`.

    Args:
        config: the composed configuration as plain data.
        checked: the same configuration, checked and typed.
        task: data set of the run. If it measures time or memory, the result also contains the machine.
    """
    data: dict[str, Any] = {"identity": task.identity(), "version": task.version}
    machine = task.machine_identity(checked.runtime, lambda: machine_name(checked))
    if machine is not None:
        data["setting"] = machine
    return identity(settled(config, checked), data, checked.model.folder(), say)


def machine_name(checked: RunConfig) -> str:
    """Return the name of the device, or the number and the name of the devices, on which a run would take place."""
    from kvbench.models.devices import homes
    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    devices = homes(checked.runtime)
    name = device_name(devices[0]) or cpu_name()
    return name if len(devices) == 1 else f"{len(devices)} x {name} (device_map)"


def fitted(config: Mapping[str, Any], checked: RunConfig) -> dict[str, Any]:
    """Return the configuration to record for a run, with the group sizes that are really used.

    Default group sizes that do not divide the model's head dimension are replaced. A replacement becomes part of the
    quantizer's name, for example ``int2+value.group_size=16``, and a message reports it.

    Args:
        config: the composed configuration as plain data.
        checked: the same configuration, checked and typed.
    """
    head_dim, record = checked.model.head_dim(), dict(config)
    groups = checked.method.fitted(head_dim) if head_dim else {}
    for key, size in groups.items():
        group, *path = key.split(".")
        record[group] = _with(record[group], path, size)
    if groups:
        name = true_name(record["quantizer"])
        if name == "none":  # the method's own formats
            name = ",".join(f"{key.partition('.')[2]}={size}" for key, size in groups.items())
        record["quantizer"] = {**record["quantizer"], "name": name}
        say(
            f"{short_name(record)}: the default group sizes do not divide the model's head size of "
            f"{head_dim} channels; " + "using " + ", ".join(f"{key}={size}" for key, size in groups.items())
        )
    return record


def _with(group: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested `group` with the key at `path` set."""
    return {**group, path[0]: value if len(path) == 1 else _with(group[path[0]], path[1:], value)}


def settled(config: Mapping[str, Any], checked: RunConfig) -> dict[str, Any]:
    """Return the configuration with all defaults filled in.

    Thus a run has the same id whether a default value is written in the configuration or not.

    Args:
        config: the composed configuration as plain data.
        checked: the same configuration, checked and typed.
    """
    method = checked.method.hyperparameters() | checked.method.identity()
    if type(checked.method).version != 1:
        method["version"] = type(checked.method).version
    quantizer = dict(config["quantizer"])
    if checked.method.quantizer is not None and QuantizerSpec.version != 1:
        quantizer["version"] = QuantizerSpec.version
    return {
        **config,
        "model": dataclasses.asdict(checked.model),
        "method": {**method, "_target_": config["method"].get("_target_")},
        "quantizer": quantizer,
        "decoding": dataclasses.asdict(checked.decoding),
        "runtime": dataclasses.asdict(checked.runtime),
    }
