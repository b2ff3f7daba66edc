"""The schema of a run's configuration: one dataclass per group, and the constraints between groups.

For a wrong key, value or combination, :func:`checked_config` raises an error that names the key, the value, what is
allowed and the closest valid name. This module imports neither torch nor transformers; the check runs before weights or
data are read.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench import tasks
from kvbench.config.logger_config import AnyLogger, NoLogger, logger_of
from kvbench.config.run_options import DecodingConfig, RuntimeConfig
from kvbench.errors import CombinationError, ConfigError, KvbenchError, cut_text
from kvbench.models.endpoint_config import model_of
from kvbench.models.quantized.plan import check_whole
from kvbench.models.spec import ModelConfig
from kvbench.tasks.base import Task
from kvbench.util.schema import build, unknown

#: groups of a run's configuration, in the order in which they are checked and shown
GROUPS = ("model", "quantizer", "method", "dataset", "decoding", "runtime", "logger")


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run as typed and checked data.

    Args:
        method: instance of the method's class, which also holds the quantizer.
        dataset: the group ``dataset`` as plain data.
        task: the data set as an object, built from the group ``dataset``.
        plain: all groups as plain data, as they were composed: what is stored, hashed and sent to other processes.
    """

    model: ModelConfig
    method: Any
    dataset: Mapping[str, Any]
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logger: AnyLogger = field(default_factory=lambda: NoLogger(name="none"))
    task: Task = field(default_factory=Task)
    plain: Mapping[str, Any] = field(default_factory=dict)


def checked_config(config: Mapping[str, Any]) -> RunConfig:
    """Check a composed configuration, which maps group names to keys and values, and return it as typed data.

    Raises:
        ConfigError: a key, value or combination is wrong; the error describes the first one found.
    """
    for group in config:
        if group not in GROUPS:
            raise unknown(str(group), None, "no such group", GROUPS)
    for group in GROUPS:
        if not isinstance(config.get(group), Mapping):
            raise ConfigError(
                group,
                config.get(group),
                "must be a group of keys",
                hint=f"choose one with {group}=NAME; --help lists the names",
            )
    model = model_of(config["model"])
    model.check()
    decoding = build(DecodingConfig, config["decoding"], "decoding")
    decoding.check()
    runtime = build(RuntimeConfig, config["runtime"], "runtime")
    runtime.check()
    logger = logger_of(config["logger"])
    method = _method(config["method"], config["quantizer"], model)
    task = tasks.load(config["dataset"])
    checked = RunConfig(model, method, dict(config["dataset"]), decoding, runtime, logger, task, config)
    _combinations(checked)
    task.fits(checked)
    return checked


def _method(method: Mapping[str, Any], quantizer: Mapping[str, Any], model: ModelConfig) -> Any:
    from kvbench.methods.load import method_from_config

    checked = method_from_config(method, quantizer)
    try:
        checked.check(head_dim=model.head_dim(), max_length=model.max_length)
        checked.check_reach(model.max_length)
    except KvbenchError:
        raise
    except Exception as error:
        if type(checked).__module__.startswith("kvbench."):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            "method._target_",
            method.get("_target_"),
            f"its check() raised {type(error).__name__}: {cut_text(str(error))} ({last.filename}, line {last.lineno})",
        ) from error
    layers = model.layers()
    if layers is not None:
        checked.by_layer(layers)
    checked.prepare(model)
    return checked


def _combinations(checked: RunConfig) -> None:
    """Raise ConfigError for values of different groups that contradict each other."""
    model, decoding, method = checked.model, checked.decoding, checked.method
    if method.meaningless is not None and not checked.task.times_only:
        raise ConfigError(
            method.meaningless,
            getattr(method, method.meaningless.rpartition(".")[2]),
            f"makes the text meaningless, so that nothing can be scored on dataset={checked.dataset.get('name')}",
            allowed="null, or a data set on which only times and memory are measured",
            hint="add dataset=efficiency/tpot model.weights=random",
        )
    if model.rounding:
        check_whole(model, checked.runtime.tensor_parallel is not None)
        drafts = method.speculation.weights if method.speculation is not None else "same"
        if drafts == model.rounding or drafts == "int4":
            raise CombinationError(
                "method.draft_weights",
                drafts,
                f"asks for additional weights in 4 bits, but with model.weights={model.weights} all these weights have "
                "4 bits already, and the draft uses them",
                hint="method.draft_weights=same",
            )
    if model.served_elsewhere:
        for key in ("workers", "tensor_parallel", "device_map", "shared_prefill"):
            value, usual = getattr(checked.runtime, key), getattr(RuntimeConfig(), key)
            if value != usual:
                raise CombinationError(
                    f"runtime.{key}", value, "is the server's business with model=endpoint", hint="model.concurrency=N"
                )
    if checked.runtime.workers != 1 and (checked.task.single_process or checked.task.adaptive):
        raise CombinationError(
            "runtime.workers",
            checked.runtime.workers,
            f"cannot be used with dataset={checked.dataset.get('name')}, which measures a single process",
            hint="runtime.workers=1",
        )
    for key, new in (
        ("decoding.max_new_tokens", decoding.max_new_tokens),
        ("dataset.max_new_tokens", getattr(checked.task, "max_new_tokens", None)),
    ):
        if key.startswith("dataset") and decoding.max_new_tokens:
            continue  # overridden by decoding.max_new_tokens
        if isinstance(new, int) and new >= model.max_length:
            raise ConfigError(
                key,
                new,
                f"leaves no room for a prompt, because model.max_length={model.max_length}",
                allowed=f"at most {model.max_length - 1}",
            )
