"""The run id: a hash of everything that determines the outputs, and of nothing else.

An id consists of two hashes, ``<setting>-<method>``. The first covers the model, the data, the decoding options, the
seed, and the version number of the code that generates answers. The second covers the method with its quantizer. Runs
whose samples can be compared therefore have the same first hash; the fp16 run for a comparison is found by this hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.util.fingerprint import fingerprint

#: to be incremented when the same configuration would give other outputs (a change of prompts, decoding, quantization)
GENERATION_VERSION = 1

#: version of the sampling of tokens; part of the identity of runs with a temperature above 0
_DRAW = 2

#: ``method._target_`` of the method that all others are paired with
BASELINE_TARGET = "kvbench.methods.fp16.FP16"

# The other keys (the path of the files, the licence, notes) do not change the outputs.
_MODEL_KEYS = (
    "name",
    "hub_id",
    "revision",
    "weights",
    "dtype",
    "max_length",
    "prompt_limit",
    "chat",
    "architecture",
)
_HASH_CHARS = 10

#: hyper-parameters that methods got later, with the value that changes nothing: with this value they are left out of
#: the identity, so that run ids stay. ``CLASS.KEY`` is that of one method
_LATER: dict[str, Any] = {
    "Atom.sinks": 0,
    "Atom.window": 0,
    "Kivi.window": 0,
}


def identity(
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    weights: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Collect everything that determines a run's outputs, as JSON data; the run id is a hash of it (:func:`run_id`).

    Left out is what does not change the answer to a prompt: the scorer's version, the number of samples, loggers,
    paths, launcher, device, batch size and prefill chunk.

    Args:
        config: the resolved configuration (`model`, `method`, `quantizer`, `decoding`, `runtime`).
        data: identity and version of the task, ``{"identity": task.identity(), "version": task.version}``.
        weights: the local folder from which the weights are read, or None. The content of the files counts, not the
            path.
        say: function that shows a line to the user; called if more than 2 GiB of weights have to be read, which takes
            time.

    Returns:
        ``{"setting": {...}, "method": {...}}``, the material of the two hashes.
    """
    model = {key: config["model"].get(key) for key in _MODEL_KEYS}
    if config["model"].get("preset"):  # a data set's prompt limit for the preset applies to this model too
        model["preset"] = config["model"]["preset"]
    if not str(model["weights"]).startswith("random"):
        model["architecture"] = None  # the checkpoint's own config.json is read instead
        source = _converted_from(weights)
        if source is None:
            model["files"] = fingerprint(weights, say)
        else:  # a converted tokenizer's spelling differs by the version of transformers, its tokens do not
            model["files"] = fingerprint(weights, say, suffixes=(".safetensors", ".jinja"))
            model["gguf"] = source
    elif weights is None:
        model["revision"] = None  # random weights of a preset's architecture, whatever commit the preset pins
    elif not str(config["model"].get("path")).startswith("kvbench:"):
        model["description"] = _definition_digest(weights)
    if config["model"].get("endpoint"):
        model["endpoint"] = config["model"]["endpoint"]
    if config["model"].get("outliers", "none") != "none":
        model["outliers"] = config["model"]["outliers"]
    method = {
        key: value
        for key, value in config["method"].items()
        if key not in ("takes", "preset") and not _neutral(config["method"], key)
    }
    quantizer = config.get("quantizer") or {}
    formats = {key: value for key, value in quantizer.items() if key != "name"}
    material = {
        "setting": {
            "generation_version": GENERATION_VERSION,
            "model": model,
            "data": dict(data),
            "decoding": {
                **{key: value for key, value in config["decoding"].items() if key != "top_k" or value is not None},
                **({"draw": _DRAW} if config["decoding"].get("temperature") else {}),
            },
            "seed": config["runtime"].get("seed", 0),
        },
        "method": {"method": method, "quantizer": formats or None},
    }
    # by way of JSON, so that tuples, sets and paths are as they would be read from a file
    plain: dict[str, Any] = json.loads(_canonical(material))
    return plain


def _neutral(method: Mapping[str, Any], key: str) -> bool:
    """Return True if a hyper-parameter is in :data:`_LATER` and has the value with which it has no effect."""
    names = (key, f"{str(method.get('_target_')).rpartition('.')[2]}.{key}")
    return any(name in _LATER and method[key] == _LATER[name] for name in names)


def _definition_digest(folder: Path) -> str:
    """Return a digest of the files that define a model with random weights: its config.json and its tokenizer."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer.model"):
        file = folder / name
        digest.update(f"{name}:".encode() + (file.read_bytes() if file.is_file() else b"-"))
    return digest.hexdigest()[:16]


def _converted_from(folder: Path | None) -> str | None:
    """Return the SHA-256 of the GGUF file from which a checkpoint was converted; None for every other folder.

    :mod:`kvbench.models.gguf.convert` writes the file that records it.
    """
    file = None if folder is None else folder / "gguf.json"
    if file is None or not file.is_file():
        return None
    digest: str = json.loads(file.read_text(encoding="utf-8"))["sha256"]
    return digest


def run_id(material: Mapping[str, Any]) -> str:
    """Hash the result of :func:`identity` to a run id, ``<setting>-<method>``: two hashes of ten hexadecimal digits."""
    return f"{_material_digest(material['setting'])}-{_material_digest(material['method'])}"


def is_baseline(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration's method is fp16, the baseline with which other methods are compared.

    fp16 with rotated heads is not the baseline, because its rounding differs.
    """
    rotation = config["method"].get("rotation") or {}
    rotated = any(name != "none" for name in rotation.values())
    return config["method"].get("_target_") == BASELINE_TARGET and not rotated


def rounded_weights(config: Mapping[str, Any]) -> str | None:
    """Return a configuration's value of ``model.weights`` if it rounds weights to 4 bits, else None."""
    weights = str(config["model"].get("weights"))
    return weights if "int4" in weights else None


#: rotations that methods have by default, by the name of their class; others have none
ROTATIONS = {
    "Engine": {"key": "engine", "value": "engine"},
    "Kvarn": {"key": "hadamard", "value": "hadamard"},
    "TurboQuant": {"key": "engine", "value": "none"},
}


def short_name(config: Mapping[str, Any]) -> str:
    """Return the names of method and quantizer as tables show them, for example ``kivi int2``.

    They are followed by the share of tokens that is kept, by formats of single layers, by a rotation that is not the
    method's default, and by attention that is not exact: ``keep int4 keep=0.5``, ``kivi int4 layers=0-1:fp16
    rotation=hadamard``, ``engine q8_0 attention=engine``. Speculation with a forced acceptance, whose text is
    meaningless, is labelled so: ``quantspec (forced acceptance 0.9)``. A model behind a server is labelled with the
    engine that the run starts, or ``@url``: ``engine q8_0 @llamacpp``.
    """
    method, quantizer = config["method"], (config.get("quantizer") or {}).get("name")
    # only methods that have formats of their own, in place of a quantizer's presets
    form = method.get("format") if isinstance(method.get("format"), str) else None
    layers, forced = method.get("layers"), method.get("forced_acceptance")
    if isinstance(layers, Mapping):
        layers = [f"{span}:{name}" for span, name in layers.items()]
    # a mapping has become a list here; a string, in which entries are separated by commas, stays as it is
    mixed = layers and f"layers={layers if isinstance(layers, str) else ','.join(layers)}"
    label = None if forced is None else f"(forced acceptance {forced:g})"
    packed = None if quantizer == "none" else quantizer
    share = None if method.get("keep") is None else f"keep={method['keep']}"
    computed = None if method.get("attention", "exact") == "exact" else f"attention={method['attention']}"
    scaled = "calibrated" if form and method.get("calibration") else None
    server = config.get("model") or {}
    where = f"@{server.get('serve') or 'url'}" if server.get("serve") or server.get("urls") else None
    parts = (method_name(config), form, packed, share, mixed, _rotated(method), computed, scaled, label, where)
    return " ".join(part for part in parts if part)


def _rotated(method: Mapping[str, Any]) -> str | None:
    """Return a method's rotations as labels show them; None if they are the method's defaults."""
    given, usual = method.get("rotation") or {}, ROTATIONS.get(str(method.get("_target_")).rpartition(".")[2], {})
    names = [str(given.get(side, usual.get(side, "none"))) for side in ("key", "value")]
    if names == [usual.get(side, "none") for side in ("key", "value")]:
        return None
    return "rotation=" + "/".join(dict.fromkeys(name.rpartition("/")[2] for name in names))


def method_name(config: Mapping[str, Any]) -> str:
    """Return the name of a method: of its preset (``method.preset``, set by the command line), or of its module."""
    target, preset = str(config["method"].get("_target_", "?")), config["method"].get("preset")
    return str(preset or (target.rsplit(".", 2)[-2] if target.count(".") >= 2 else target.rsplit(".", 1)[-1].lower()))


def content_digest(content: Any) -> str:
    """Hash JSON data to ten hexadecimal digits, independently of the order of keys."""
    return _material_digest(content)


def full_digest(content: Any) -> str:
    """Hash JSON data to its whole SHA-256 in hexadecimal digits, independently of the order of keys."""
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _material_digest(material: Any) -> str:
    return full_digest(material)[:_HASH_CHARS]


def _canonical(material: Any) -> str:
    return json.dumps(material, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_plain_material)


def _plain_material(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value)
