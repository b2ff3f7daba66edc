"""From a data set's configuration to its task; `_target_` is the registry."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from kvbench.errors import ConfigError
from kvbench.schema import build
from kvbench.tasks.base import Task


def load(config: Mapping[str, Any]) -> Task:
    """Make the task that a data set's configuration describes.

    Args:
        config: plain data; ``_target_`` names the class, the other keys are its fields.

    Raises:
        ConfigError: no such class, an unknown key, a wrong value.
    """
    data = dict(config)
    target = data.pop("_target_", None)
    if not isinstance(target, str) or "." not in target:
        raise ConfigError("dataset._target_", target, "must name a class", hint="for example kvbench.tasks.mini.Mini")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("dataset._target_", target, f"cannot be imported ({error})") from error
    task = build(cls, data, "dataset")
    check = getattr(task, "check", None)
    if check is not None:
        check()
    return cast(Task, task)
