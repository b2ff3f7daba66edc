"""Construction of a task from its configuration, whose ``_target_`` names the class; there is no other registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks.base import Task
from kvbench.util.schema import build, load_class


def load(config: Mapping[str, Any]) -> Task:
    """Construct the task (data set) that the configuration group `dataset` describes, and check its options.

    ``_target_`` is the full name of the task's class; all other keys are fields of that dataclass.

    Raises:
        ConfigError: the class does not exist or is not a task, a key is unknown, or a value is invalid.
    """
    data = dict(config)
    cls = load_class("dataset._target_", data.pop("_target_", None), "kvbench.tasks.mini.Mini")
    if not issubclass(cls, Task) or not dataclasses.is_dataclass(cls):
        raise ConfigError(
            "dataset._target_",
            config["_target_"],
            "is not a task, that is, a dataclass derived from kvbench.tasks.Task",
            hint="define @dataclass(kw_only=True) class MyTask(Task): ... (see kvbench/tasks/base.py)",
        )
    task: Task = build(cls, data, "dataset")
    task.check()
    return task
