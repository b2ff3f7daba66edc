"""Names that distinguish runs: method, quantizer, and the settings in which runs of the same name differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.util.table import printable

Metrics = Mapping[str, Any]

#: keys of the group `method` that are not hyper-parameters
UNSAID = ("_target_", "takes", "preset")
#: options of a data set, as its identity has them, that change what is asked of the cache
ASKED = ("turns", "history", "questions")
#: hyper-parameters that the label of a run always shows, in one spelling
SHOWN = ("layers",)


def run_label(run: Metrics) -> str:
    """Return a run's label, and the storage dtype if it is not the model's usual one: ``kivi int2 dtype=float32``.

    Only ``label`` and ``env`` of `metrics.json` are read. In versions that record no usual dtype, ``model.dtype=auto``
    meant float32 on a CPU.
    """
    env = run.get("env") or {}
    dtype, usual = env.get("dtype"), env.get("usual_dtype")
    unusual = dtype is not None and (dtype == "float32" if usual is None else dtype != usual)
    return f"{run['label']} dtype={dtype}" if unusual else str(run["label"])


def labels(runs: Sequence[Metrics], beside: Sequence[str] = ()) -> list[str]:
    """Name the runs of a table so that they can be told apart, for example ``kivi int2 residual=64``.

    A name consists of the method, the quantizer, and the options in which runs of this method and quantizer differ,
    without options in `beside`, which another column shows. Control characters in it are escaped. Only ``label``,
    ``config``, ``env`` and ``data`` of `metrics.json` are read.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    settings = [{key: value for key, value in _settings(run).items() if key not in beside} for run in runs]
    for run, mine in zip(runs, settings, strict=True):
        alike.setdefault(run_label(run), []).append(mine)
    differing = {}
    for label, group in alike.items():  # one that differs from any other differs from the first, or the first does
        keys = dict.fromkeys(key for one in group for key in one)
        differing[label] = {key for key in keys if any(one.get(key) != group[0].get(key) for one in group)}
    names = []
    for run, mine in zip(runs, settings, strict=True):
        label = run_label(run)
        settings_shown = [
            f"{key.rsplit('.', 1)[-1]}={_typed_value(mine[key])}" for key in mine if key in differing[label]
        ]
        names.append(printable(" ".join([label, *settings_shown])))
    return names


def _typed_value(value: Any) -> str:
    """Return the value of a setting as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(_typed_value, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _settings(run: Metrics) -> dict[str, Any]:
    config = run["config"]
    flat = {key: config.get(key) for key in ("model", "weights", "dataset", "seed")}
    for side, form in (config.get("formats") or {}).items():
        flat |= {f"quantizer.{side}_{key}": value for key, value in form.items()}
    flat |= {f"method.{key}": value for key, value in config["method"].items() if key not in (*UNSAID, *SHOWN)}
    rotation = config["method"].get("rotation") or {}  # runs from before the option have none
    flat["method.rotation"] = "/".join(dict.fromkeys(str(rotation.get(side, "none")) for side in ("key", "value")))
    data = (run.get("data") or {}).get("identity") or {}
    flat |= {f"dataset.{key}": data[key] for key in ASKED if key in data}
    server = (run.get("env") or {}).get("endpoint") or {}
    flat |= {f"model.{key}": server[key] for key in ("concurrency", "prefix_reuse") if key in server}
    return flat | {f"decoding.{key}": value for key, value in config["decoding"].items()}
