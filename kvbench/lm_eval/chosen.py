"""The configuration behind lm-eval's ``--model_args``: the same groups and names as on kvbench's command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvbench.cli.compose import Composer
from kvbench.config.run_config import RunConfig
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, nearest
from kvbench.results.identity import identity
from kvbench.runner.resolve import settled
from kvbench.util.progress import say

#: arguments of the model that stand for keys of kvbench's configuration
KEYS = {
    "dtype": "model.dtype",
    "max_length": "model.max_length",
    "path": "model.path",
    "hub_id": "model.hub_id",
    "revision": "model.revision",
    "weights": "model.weights",
    "trust_remote_code": "model.trust_remote_code",
    "device": "runtime.device",
    "arithmetic": "runtime.arithmetic",
    "prefill_chunk": "runtime.prefill_chunk",
    "graphs": "runtime.graphs",
    "compile": "runtime.compile",
    "seed": "runtime.seed",
}

#: a data set that is checked in place of lm-eval's tasks; its prompts are short enough for models of 512 tokens
PLACEHOLDER = ("dataset=mini/passkey", "dataset.lengths=[512]")


def setting_key(chosen: RunConfig, host: Mapping[str, Any] | None = None) -> str:
    """Return sixteen hexadecimal digits that differ between models, settings and their options.

    The content of local weights and of a method's calibration file counts, not their paths. `host` has lm-eval's own
    arguments of the model that change an answer, for example ``add_bos_token``.
    """
    runtime = chosen.plain["runtime"]
    material = {
        **identity(settled(chosen), {}, chosen.model.folder(), say),
        "runtime": {key: runtime.get(key) for key in ("seed", "prefill_chunk", "graphs", "compile")},
        **({"host": dict(host)} if host else {}),
    }
    return hashlib.sha256(json.dumps(material, sort_keys=True, default=str).encode()).hexdigest()[:16]


def choose(arguments: Mapping[str, Any]) -> RunConfig:
    """Compose and check the configuration that model arguments describe; its data set is a placeholder.

    The arguments are ``model`` (a preset, a repository or a folder; ``pretrained`` is accepted for it), ``setting``
    (:data:`kvbench.config.setting.SYNTAX`; default ``fp16``) and the keys of :data:`KEYS`.

    Raises:
        ConfigError: an argument is unknown, or the model, setting or a value is invalid.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    names = [key for key in ("model", "pretrained") if key in given]
    if len(names) != 1:
        raise ConfigError(
            "model_args",
            ",".join(f"{key}={value}" for key, value in given.items()),
            "must name one model",
            hint="--model_args model=llama2-7b,setting=kivi:int4",
        )
    texts = [
        f"model={given.pop(names[0])}",
        *parse_setting(str(given.pop("setting", "fp16"))).overrides(),
        "logger=none",
    ]
    texts += PLACEHOLDER
    for key, value in given.items():
        if key not in KEYS:
            near = nearest(key, ["model", "setting", *KEYS])
            raise ConfigError(
                "model_args",
                key,
                "is not an argument of the model kvbench",
                allowed=("model", "setting", "batch_size", "results_dir", *KEYS),
                hint=f"did you mean {near}?" if near else "model=llama2-7b,setting=kivi:int4",
            )
        texts.append(f"{KEYS[key]}={_typed_argument(value)}")
    composer = Composer()
    composer.check(texts)
    return composer.configuration(texts)


def _typed_argument(value: Any) -> str:
    """Return a value as it is typed on kvbench's command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
