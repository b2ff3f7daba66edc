"""The two forms of a run's configuration: the data hashed into the run id, and the configuration that is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.methods.layer_map import KEY as LAYERS
from kvbench.methods.load import true_name
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.results.identity import identity, short_name
from kvbench.util.progress import say


def material(checked: RunConfig) -> dict[str, Any]:
    """Return the JSON data of which the run id is a hash: everything that determines the outputs of a run.

    If the results of the data set depend on the machine, the machine is part of it. See
    :func:`kvbench.results.identity.identity`.
    """
    task = checked.task
    data: dict[str, Any] = {"identity": task.identity(), "version": task.version}
    machine = task.machine_identity(checked.runtime, lambda: machine_name(checked))
    if machine is not None:
        data["setting"] = machine
    return identity(settled(checked), data, checked.model.folder(), say)


def machine_name(checked: RunConfig) -> str:
    """Return the name of the device on which a run would take place.

    If the run would use several devices, the name begins with their number: ``2 x NVIDIA H200 (device_map)``.
    """
    from kvbench.models.devices import homes
    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    devices = homes(checked.runtime)
    name = device_name(devices[0]) or cpu_name()
    return name if len(devices) == 1 else f"{len(devices)} x {name} (device_map)"


def fitted(checked: RunConfig) -> RunConfig:
    """Return the configuration as a run records it: with the group sizes that are really used.

    A default group size is replaced if it does not divide the model's head dimension. The new size becomes part of the
    quantizer's name, for example ``int2+value.group_size=16``, and a message reports it.
    """
    head_dim, record = checked.model.head_dim(), dict(checked.plain)
    sizes = checked.method.fitted(head_dim) if head_dim else {}
    groups = {key: size for key, size in sizes.items() if not key.startswith(f"{LAYERS}.")}
    for key, size in groups.items():
        group, *path = key.split(".")
        record[group] = _with(record[group], path, size)
    if groups:
        name = true_name(record["quantizer"])
        if name == "none":  # the method's own formats
            name = ",".join(f"{key.partition('.')[2]}={size}" for key, size in groups.items())
        record["quantizer"] = {**record["quantizer"], "name": name}
    if sizes:
        say(
            f"{short_name(record)}: the default group sizes do not divide the model's head size of "
            f"{head_dim} channels; " + "using " + ", ".join(f"{key}={size}" for key, size in sizes.items())
        )
    return dataclasses.replace(checked, plain=record)


def _with(group: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested `group` with the key at `path` set."""
    return {**group, path[0]: value if len(path) == 1 else _with(group[path[0]], path[1:], value)}


def settled(checked: RunConfig) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, for the run id.

    A run thus has the same id whether a default value is written in the configuration or left out.
    """
    config = checked.plain
    method = checked.method.hyperparameters() | checked.method.identity()
    if "rotation" in method:
        method["rotation"] = checked.method.rotation.identity()
    if "layers" in method:
        method["layers"] = checked.method.layer_identity()
    if type(checked.method).version != 1:
        method["version"] = type(checked.method).version
    quantizer = dict(config["quantizer"])
    if checked.method.quantizer is not None and QuantizerSpec.version != 1:
        quantizer["version"] = QuantizerSpec.version
    return {
        **config,
        "model": dataclasses.asdict(checked.model) | checked.model.more_identity(),
        "method": {**method, "_target_": config["method"].get("_target_")},
        "quantizer": quantizer,
        "decoding": dataclasses.asdict(checked.decoding),
        "runtime": dataclasses.asdict(checked.runtime),
    }
