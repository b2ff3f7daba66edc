"""Loading of methods by name; the YAML files in ``conf/method`` are the registry. Needs neither Hydra nor torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.quantizers.spec import QuantizerSpec, describe_formats, preset_name
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.schema import build, load_class

#: entry-point group by which another package offers methods: name = "module:Class"
ENTRY_POINTS = "kvbench.methods"
#: endings of a file that is a method
_FILES = (".yaml", ".yml", ".py")


def load_method(
    name: str | Mapping[str, Any], quantizer: str | Mapping[str, Any] | None = None, **overrides: Any
) -> Method:
    """Make a method from its YAML file, with hyper-parameters given as keyword arguments, and check it.

    Args:
        name: name of a file in ``conf/method`` without its suffix (``"kivi"``); path of a YAML file, or of a Python
            file with the class and no YAML file; name of an installed entry point; or a dict with the class as
            ``_target_`` and hyper-parameters.
        quantizer: name of a preset in ``conf/quantizer`` (``"int2"``), or of one in the folder ``DIR/quantizer`` if
            the method is ``DIR/method/NAME.yaml``, or a dict with the keys of such a preset. None: the method's
            default. A dict may omit ``name``; if it has one, it must be the name that describes its
            formats, such as ``int2+key.group_size=64``.
        overrides: hyper-parameters of the method, for example ``residual=64``, ``rotation={"key": "hadamard"}`` or
            ``**{"rotation.key": "hadamard"}``.

    Raises:
        ConfigError: a name, a key or a value is unknown, or the combination cannot run.
    """
    data = dict(name) if isinstance(name, Mapping) else _read_option("method", name)
    extra = None if isinstance(name, Mapping) else _own_folder(name)
    default = _default_quantizer(data.pop("defaults", None))
    if quantizer is None:
        quantizer = default or "none"
    formats = dict(quantizer) if isinstance(quantizer, Mapping) else _read_option("quantizer", quantizer, extra)
    formats.pop("defaults", None)
    nameless = "name" not in formats  # the method's own preset, and what is different
    if nameless:
        formats["name"] = true_name({"name": default, **formats}, extra)
    method = method_from_config(_merged(data, overrides), formats)
    if nameless and method.quantizer is not None:  # every group was typed
        method.quantizer = method.quantizer.as_default(None)
    method.check()
    return method


def method_from_config(method: Mapping[str, Any], quantizer: Mapping[str, Any]) -> Method:
    """Make a method from the groups ``method`` and ``quantizer`` of a composed configuration.

    Only the names and types of its settings are checked. To check their values too, call ``check()`` on the result.

    Args:
        method: the class as ``_target_``, and hyper-parameters; ``preset``, the name of the YAML file, is ignored.
        quantizer: a quantizer group with ``name``, ``key`` and ``value``, or ``{"name": "none"}`` for no quantizer.

    Raises:
        ConfigError: the class is missing, a key or type is wrong, or the quantizer's name does not match its formats.
    """
    cls = _class(method.get("_target_"))
    data = {key: value for key, value in method.items() if key not in ("_target_", "quantizer", "preset")}
    instance = build(cls, data, "method")
    if dict(quantizer) != {"name": "none"}:
        instance.quantizer = build(QuantizerSpec, quantizer, "quantizer")
        right = true_name(quantizer)
        if instance.quantizer.name != right:
            raise ConfigError(
                "quantizer.name",
                instance.quantizer.name,
                f"does not match the formats: {_formats(instance.quantizer)}",
                hint=f"set quantizer.name='{right}', or, in Python, remove the name from the dict",
            )
        path = group_options("quantizer").get(preset_name(instance.quantizer.name))
        if path is not None:  # a preset's groups are fitted to the model's heads, a person's are not
            standard = {k: v for k, v in read_choice(path).items() if k != "defaults"}
            instance.quantizer = instance.quantizer.as_default(build(QuantizerSpec, standard, "quantizer"))
    return instance


def true_name(quantizer: Mapping[str, Any], extra: Path | None = None) -> str:
    """Return the name for a quantizer's formats: the preset's name, followed by all differences from the preset.

    Examples are ``int2`` and ``int2+key.group_size=64``. The group's own ``name`` must begin with the name of a preset,
    from kvbench or the folder `extra` (``--config-dir``).
    """
    name = str(quantizer.get("name"))
    path = group_options("quantizer", extra).get(preset_name(name))
    standard = None if path is None else read_choice(path)
    return describe_formats(name, quantizer, standard)


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data` updated by `overrides`, whose names may be dotted (``rotation.key``)."""
    merged = dict(data)
    for key, value in overrides.items():
        group, dot, name = key.partition(".")
        merged[group] = _merged(merged.get(group) or {}, {name: value}) if dot else value
    return merged


def _formats(spec: QuantizerSpec) -> str:
    sides = ((side, getattr(spec, side)) for side in ("key", "value"))
    return ", ".join(f"{side}s of {f.bits} bits per {f.axis} in groups of {f.group_size}" for side, f in sides)


def _class(target: Any) -> type[Method]:
    cls = load_class("method._target_", target, "kvbench.methods.kivi.Kivi")
    if not issubclass(cls, Method) or cls is Method:
        raise ConfigError(
            "method._target_",
            target,
            "is not a subclass of kvbench.methods.base.Method",
            hint="derive it: class Mine(Method)",
        )
    return cls


def _own_folder(name: str) -> Path | None:
    """Return DIR if the method is the file ``DIR/method/NAME.yaml`` or ``.py``, else None."""
    folder = Path(name).absolute().parent
    return folder.parent if name.endswith(_FILES) and folder.name == "method" else None


def _read_option(group: str, name: str, extra: Path | None = None) -> dict[str, Any]:
    """Read one option of a group as plain data."""
    path = Path(name) if name.endswith(_FILES) else group_options(group, extra).get(name)
    if path is not None and path.is_file():
        return read_choice(path)
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name) if group == "method" else ()
    for entry in entry_points:
        cls = entry.load()
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}"}
    raise ConfigError(group, name, f"no such {group}", allowed=group_options(group, extra))


def _default_quantizer(defaults: Any) -> str | None:
    """Return the quantizer preset that a method's YAML names in its defaults list, if any."""
    for item in defaults or ():
        if isinstance(item, Mapping):
            for key, value in item.items():
                if str(key).startswith("override /quantizer"):
                    return str(value)
    return None
