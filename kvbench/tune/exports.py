"""A recipe as settings of kvbench and of engines; what an engine cannot say is refused by the first layer that has it.

Sources: vLLM's ``--kv-cache-dtype`` and ``--kv-cache-dtype-skip-layers`` (``vllm/config/cache.py``); Model-Optimizer's
``kv_cache_quantized_layers``, schema version 1 (PR 2272), which vLLM's PR 56116 reads; llama.cpp's ``common/arg.cpp``;
SGLang's ``--kv-cache-dtype`` (``python/sglang/srt/server_args.py``); TensorRT-LLM's ``trtllm-serve
--kv_cache_dtype`` (PR 11487).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.endpoint.engines import LLAMACPP, SGLANG, VLLM
from kvbench.errors import ConfigError, KvbenchError
from kvbench.methods.layer_map import EXACT
from kvbench.quantizers.engine.formats import FORMATS
from kvbench.tune.space import form_of, layer_map

#: formats of keys and values that ModelOpt's checkpoints name
MODELOPT = {"fp8": "FP8", "nvfp4": "NVFP4", "fp8/nvfp4": "FP8_K_NVFP4_V"}
#: formats that TensorRT-LLM can be told to use, for all layers
TENSORRT = {EXACT: "auto", "fp8": "fp8", "nvfp4": "nvfp4"}


def forms_in(record: Mapping[str, Any]) -> list[str]:
    """Return the form of each layer of a ``recipe.json``.

    Raises:
        KvbenchError: the record is not one of a recipe, or names a format that kvbench does not have.
    """
    try:
        if record["kind"] != "recipe" or not record["layers"]:
            raise KeyError("kind")
        for number, layer in enumerate(record["layers"]):
            for side in ("keys", "values"):
                if layer[side] != EXACT and layer[side] not in FORMATS:
                    raise KvbenchError(
                        f"layer {number} has {layer[side]!r} for its {side}, which is not a format of kvbench.\n"
                        f"  hint: formats are {', '.join([EXACT, *FORMATS])}"
                    )
            sides = {layer["keys"], layer["values"]}
            if len(sides) == 2 and any(name == EXACT or FORMATS[name].octave for name in sides):
                raise KvbenchError(
                    f"layer {number} has {layer['keys']} for its keys and {layer['values']} for its values, which is "
                    "impossible.\n  hint: give both the same of the two"
                )
        return [form_of(layer["keys"], layer["values"]) for layer in record["layers"]]
    except (KeyError, TypeError) as error:
        raise KvbenchError(
            "the file is not a recipe of kvbench.tune.\n  hint: name recipe.json in a folder of --out"
        ) from error


def _refuse(engine: str, layer: int, form: str, why: str) -> KvbenchError:
    return KvbenchError(
        f"{engine} cannot say this recipe: layer {layer} is {form}, and {why}.\n"
        "  hint: search with --formats of this engine, or --export kvbench"
    )


def for_kvbench(forms: Sequence[str]) -> str:
    """Return the overrides of ``python -m kvbench``."""
    return f"method=engine 'method.layers=[{layer_map(forms)}]'"


def for_llama_cpp(forms: Sequence[str]) -> str:
    """Return llama.cpp's flags, which have one type for the keys of all layers and one for their values."""
    flags = _alike("llama.cpp", forms, lambda form: "-ctk {} -ctv {}".format(*LLAMACPP.flags(form)))
    return flags if forms[0] == EXACT else f"-fa on {flags}"


def for_vllm(forms: Sequence[str]) -> str:
    """Return vLLM's flags: one format, and layers that are left exact."""
    packed = {layer: form for layer, form in enumerate(forms) if form != EXACT}
    form = _alike("vLLM", packed or forms, lambda form: VLLM.flags(form)[0])
    skipped = [str(layer) for layer, form in enumerate(forms) if form == EXACT] if packed else []
    return f"--kv-cache-dtype {form}" + (f" --kv-cache-dtype-skip-layers {' '.join(skipped)}" if skipped else "")


def for_sglang(forms: Sequence[str]) -> str:
    """Return SGLang's flag, which has one format for all layers."""
    return f"--kv-cache-dtype {_alike('SGLang', forms, lambda form: SGLANG.flags(form)[0])}"


def for_tensorrt_llm(forms: Sequence[str]) -> str:
    """Return TensorRT-LLM's flag, which has one format for all layers."""
    return f"--kv_cache_dtype {_alike('TensorRT-LLM', forms, TENSORRT.__getitem__)}"


def _alike(engine: str, forms: Sequence[str] | Mapping[int, str], spelled: Callable[[str], str]) -> str:
    """Return an engine's spelling of the one form of all layers; raise KvbenchError by the first that differs."""
    by_layer = forms if isinstance(forms, Mapping) else dict(enumerate(forms))
    first = next(iter(by_layer))
    for layer, form in by_layer.items():
        try:
            text = spelled(form)
        except (ConfigError, KeyError):
            raise _refuse(engine, layer, form, "its caches have no such format") from None
        if form != by_layer[first]:
            raise _refuse(engine, layer, form, f"layer {first} is {by_layer[first]}; its caches have one format")
    return text


def for_modelopt(forms: Sequence[str]) -> str:
    """Return the entries of a ModelOpt checkpoint's ``hf_quant_config.json``; layers that it leaves out are exact."""
    named = {}
    for layer, form in enumerate(forms):
        if form == EXACT:
            continue
        if form not in MODELOPT:
            raise _refuse("ModelOpt", layer, form, f"its caches are {', '.join(MODELOPT)} or exact")
        named[f"model.layers.{layer}.self_attn"] = {"quant_algo": MODELOPT[form]}
    algorithms = {entry["quant_algo"] for entry in named.values()}
    if not named:
        raise KvbenchError("ModelOpt needs no entry for this recipe: all layers are exact")
    whole = algorithms.pop() if len(algorithms) == 1 else "MIXED_PRECISION"
    entries = {"kv_cache_quant_algo": whole, "kv_cache_quantized_layers": named, "kv_cache_schema_version": 1}
    return json.dumps({"quantization": entries}, indent=1)


#: exports by the name of ``--export``: functions of the form of each layer
EXPORTS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "kvbench": for_kvbench,
    "llama.cpp": for_llama_cpp,
    "vllm": for_vllm,
    "sglang": for_sglang,
    "modelopt": for_modelopt,
    "tensorrt-llm": for_tensorrt_llm,
}
