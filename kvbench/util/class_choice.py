"""Configuration choices given as a Python file: ``method/foo.py`` in a user's folder, with one dataclass and no YAML.

The YAML is derived from the class's fields, so that all code that reads choices as YAML reads these too.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import ConfigError, cut_text

#: groups whose choices are classes
GROUPS = ("method", "dataset")


def class_files(folder: Path) -> list[Path]:
    """Return the Python files in a group's folder that are choices: files without a YAML file of the same name."""
    if folder.name not in GROUPS:
        return []
    return [
        path
        for path in folder.glob("*.py")
        if not path.name.startswith("_") and not path.with_suffix(".yaml").exists() and path.stem.isidentifier()
    ]


def yaml_of(path: Path, common: Collection[str], quantizers: Collection[str]) -> str:
    """Return the YAML of a choice that is a Python file: the class's summary, its name, and its fields with defaults.

    A field without a default becomes ``???``, which has to be set. The first quantizer that a method's `takes` names is
    its default.

    Args:
        path: ``DIR/GROUP/NAME.py``, which is imported as the module ``GROUP.NAME``; DIR is added to ``sys.path``.
        common: keys that all choices of the group have, which are not repeated.
        quantizers: names of presets.

    Raises:
        ConfigError: the module cannot be imported, or does not define exactly one public dataclass.
    """
    cls = _dataclass_of(path)
    data: dict[str, Any] = {"_target_": f"{cls.__module__}.{cls.__qualname__}"}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in common and "group" not in field.metadata:
            data[field.name] = _plain(field)
    if "takes" in data:
        first = next((name for name in data["takes"] if name in quantizers), "none")
        data = {"defaults": [{"override /quantizer@_global_.quantizer": first}], **data}
    title = (inspect.getdoc(cls) or cls.__name__).splitlines()[0]
    return f"# {title}\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}"


def _dataclass_of(path: Path) -> type:
    """Import a file and return the one public dataclass that it defines."""
    folder, name = str(path.resolve().parents[1]), f"{path.parent.name}.{path.stem}"
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the module's own code raises
        reason = cut_text(f"{type(error).__name__}: {error}")
        raise ConfigError(str(path), None, f"cannot be imported ({reason})", hint="mend the file") from error
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(
            str(path), None, f"cannot be imported, as {name} is {module.__file__} here", hint="rename the file"
        )
    found = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == name and not cls.__name__.startswith("_")
    ]
    if len(found) != 1 or "__dataclass_fields__" not in vars(found[0]):
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ConfigError(
            str(path),
            None,
            f"must define one public class, a dataclass; it defines {names}",
            hint="write @dataclass(kw_only=True) above the class, and an underscore before the names of others",
        )
    return found[0]


def _plain(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default as a value that YAML can hold; ``???`` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = "???" if field.default is dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
