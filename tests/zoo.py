"""Tiny random models and the ways in which tests drive caches; no download, a second on one core."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Padding, Progress
from kvbench.methods import Method
from kvbench.models.projections import attentions, key_source, value_source

VOCABULARY = 97
ARCHITECTURE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 40}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
}


#: models that cap their attention scores, or have a sink in each head; the first layer's attention is sliding
CAPPED = {
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 40}),
}


@cache
def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a known architecture: 2 layers, 4 query heads, 2 KV heads of 64 channels."""
    if name in CAPPED:
        return capped(name).to(dtype).eval()
    config_class, model_class, extra = MODELS[name]
    torch.manual_seed(0)
    return model_class(config_class(**{**ARCHITECTURE, **extra})).to(dtype).eval()


def fresh(name: str = "llama") -> PreTrainedModel:
    """A model of its own with the weights of :func:`model`, to which no test has attached a cache."""
    return model.__wrapped__(name)


def capped(name: str, **more: object) -> PreTrainedModel:
    """A model of :data:`CAPPED` whose caps and sinks change much: large scores, and sinks that are no zeros."""
    config_class, model_class, extra = CAPPED[name]
    torch.manual_seed(0)
    made = model_class(config_class(**{**ARCHITECTURE, "head_dim": 64, "sliding_window": 40, **extra, **more}))
    with torch.no_grad():
        for module in (layer.self_attn for layer in made.model.layers):
            module.q_proj.weight.mul_(3.0)
            module.k_proj.weight.mul_(3.0)
            if hasattr(module, "sinks"):
                module.sinks.copy_(torch.linspace(-1.0, 5.0, len(module.sinks)))
    return made


@cache
def restless() -> PreTrainedModel:
    """A random Llama whose greedy answers do not settle into repeating a token, so that drafts are refused too."""
    with torch.inference_mode(False):  # shared by tests outside of it
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**ARCHITECTURE, initializer_range=0.1)).eval()


@cache
def calibrations(*names: str) -> str:
    """A folder with KVQuant's calibrations of random models: 3 and 4 bits, 5% outliers and none.

    It holds no others: models of one shape have equal weights, so that a calibration of any of them fits all.
    """
    folder = temporary_folder()
    for name in names:
        for path in calibrated(name):
            (folder / path.name).hardlink_to(path)
    return str(folder)


def temporary_folder() -> Path:
    """A new folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def calibrated(name: str) -> list[Path]:
    """Calibrate KVQuant for a random model, once in this process; the files with and without outliers."""
    from kvbench.calibration import file
    from kvbench.calibration.calibrate import calibrate

    sequences, _ = padded_batch([96, 96], seed=9)
    folder, paths = temporary_folder(), []
    for share in (0.05, 0.0):
        made = calibrate(model(name), sequences, name=name, bits=(3, 4), outliers=share, fisher=name == "llama")
        paths.append(folder / f"{name}-{100 * share:g}pct.safetensors")
        file.save(made, paths[-1])
    return paths


@cache
def rotations(*names: str, per_head: bool = False) -> str:
    """A folder with OSCAR's calibrations of random models."""
    from kvbench.calibration import stored
    from kvbench.calibration.rotate import rotations

    sequences, _ = padded_batch([96], seed=9)
    folder = temporary_folder()
    for name in names:
        stored.save(rotations(model(name), sequences, name=name, per_head=per_head), folder / f"{name}.safetensors")
    return str(folder)


@contextmanager
def quantized_projections(model: PreTrainedModel, change: Callable[[int, str, Tensor], Tensor]) -> Iterator[None]:
    """A model whose projections return ``change(layer, side, x)`` for the keys and values ``x`` ``[T, C]`` of a row."""
    hooks = []
    for index, attention in enumerate(attentions(model)):
        for side, source in (("key", key_source(model, attention)), ("value", value_source(model, attention))):

            def replace(module, inputs, out, index=index, side=side, source=source):
                out = out.clone()
                out[0, :, source.start : source.stop] = change(index, side, out[0, :, source.start : source.stop])
                return out

            hooks.append(source.module.register_forward_hook(replace))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def padded_batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random token ids ``[B, T]`` padded on the left, and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
    return ids * mask, mask


def new_layer(method: Method, starts: list[int] | None = None) -> KVLayer:
    """A layer without a model."""
    return KVLayer(method, 0, Progress(padding=Padding(starts)))


def feed(layer: KVLayer, keys: Tensor, values: Tensor) -> None:
    """New tokens ``[B, H, q, D]`` into a layer, without attention: the prompt first, then steps."""
    handle, _ = layer.update(keys, values)
    keys, values = handle.claim()
    if layer.sealed:
        layer.append(keys, values)
    else:
        keys, values = layer.extend_prompt(keys, values)
        layer.end_chunk(keys, values)


def random_kv(tokens: int, batch: int = 1, heads: int = 2, channels: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with channel offsets, as models have them, and plain values, ``[B, H, T, D]`` fp32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, channels)
    offset = 2 * torch.randn(1, heads, 1, channels, generator=generator)
    return torch.randn(shape, generator=generator) + offset, torch.randn(shape, generator=generator)
