"""A model and its tokenizer, ready to run: from the hub, a folder, this package, or with random weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.errors import ConfigError, ModelError
from kvbench.models.locate import Source, locate
from kvbench.models.random_weights import byte_tokenizer, hf_config, random_model
from kvbench.models.spec import ModelConfig

if TYPE_CHECKING:
    import torch


class Runtime(Protocol):
    """What loading needs of the configuration's `runtime` group (`kvbench.config.RuntimeConfig` has it)."""

    @property
    def device(self) -> str: ...
    @property
    def device_map(self) -> str | None: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Shape:
    """The numbers of a loaded model that a KV cache depends on."""

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer.

    Args:
        model: a transformers causal LM on `device`, in `dtype`.
        tokenizer: a fast tokenizer that pads on the left and has a pad token.
        name: the configuration's name of the model.
        dtype: of the parameters.
        device: where inputs go (with ``device_map`` the first of the devices).
        max_length: tokens that the model takes, prompt and answer together.
        architecture: layers, heads and head size.
        eos_token_ids: tokens that end an answer; empty for random weights, which would end by chance.
        parameters: how many there are.
        random_weights: scores mean nothing; the tokenizer is one of bytes where no folder gave another.
    """

    model: Any
    tokenizer: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    max_length: int
    architecture: Shape
    eos_token_ids: tuple[int, ...]
    parameters: int
    random_weights: bool


def load(model: ModelConfig, runtime: Runtime) -> LoadedModel:
    """Load what `model` names onto ``runtime.device``.

    Args:
        model: the `model` group, checked.
        runtime: the `runtime` group.

    Raises:
        ModelError: the weights cannot be had (in under two seconds), or transformers refuses them.
        ConfigError: the device does not exist on this machine.
    """
    source = locate(model)
    device = resolve_device(runtime.device)
    if runtime.device_map and importlib.util.find_spec("accelerate") is None:
        raise ModelError("runtime.device_map needs the package 'accelerate'.\n  hint: pip install 'kvbench[multigpu]'")
    if model.weights == "random":
        config = hf_config(model)
        made = random_model(config, resolve_dtype(model.dtype, device), device, runtime.seed)
        tokenizer = _random_tokenizer(model)
    else:
        made, tokenizer = _pretrained(model, source, device, runtime.device_map)
    return LoadedModel(
        model=made,
        tokenizer=tokenizer,
        name=model.name,
        dtype=made.dtype,
        device=made.device,
        max_length=model.max_length,
        architecture=shape_of(made.config),
        eos_token_ids=() if model.weights == "random" else _eos_token_ids(made, tokenizer),
        parameters=sum(p.numel() for p in made.parameters()),
        random_weights=model.weights == "random",
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer that :func:`load` would load, without the weights.

    Raises:
        ModelError: it cannot be had.
    """
    source = locate(model)
    if source.name is None:
        return _random_tokenizer(model)
    common = {
        "revision": source.revision,
        "local_files_only": source.local,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        return _tokenizer(source.name, common)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_refusal(model, source, error)) from error


def resolve_device(name: str) -> torch.device:
    """The device that ``runtime.device`` names; ``auto`` is the first CUDA device, else the CPU.

    Raises:
        ConfigError: this machine has no such device.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        found = [f"cuda:{index}" for index in range(count)]
        raise ConfigError("runtime.device", name, "does not exist on this machine", allowed=["auto", "cpu", *found])
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("runtime.device", name, "does not exist on this machine", allowed=["auto", "cpu"])
    return torch.device("cuda", 0) if name == "cuda" else device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of ``model.dtype``; ``auto`` is bfloat16 on a GPU, float32 elsewhere (halves are slow there)."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def shape_of(config: Any) -> Shape:
    """Layers, heads and head size of a transformers config."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return Shape(
        model_type=text.model_type,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _pretrained(model: ModelConfig, source: Source, device: torch.device, device_map: str | None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    assert source.name is not None
    common = {
        "revision": source.revision,
        "local_files_only": source.local,
        "trust_remote_code": model.trust_remote_code,
    }
    # auto on a GPU is the checkpoint's own dtype
    dtype = "auto" if model.dtype == "auto" and device.type != "cpu" else resolve_dtype(model.dtype, device)
    bars = logging.is_progress_bar_enabled()
    if source.local:
        logging.disable_progress_bar()
    try:
        made = AutoModelForCausalLM.from_pretrained(source.name, dtype=dtype, device_map=device_map, **common)
        tokenizer = _tokenizer(source.name, common)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_refusal(model, source, error)) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return (made if device_map else made.to(device)).eval(), tokenizer


def _random_tokenizer(model: ModelConfig) -> Any:
    """The folder's own tokenizer where there is one, else bytes."""
    folder = model.folder()
    if folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return _tokenizer(str(folder), {"local_files_only": True, "trust_remote_code": model.trust_remote_code})
    return byte_tokenizer()


def _tokenizer(name: str, common: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **common)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    return tuple(dict.fromkeys(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None))


def _refusal(model: ModelConfig, source: Source, error: Exception) -> str:
    said = str(error).strip()
    hint = "model.path=DIR, model.weights=random, or model=tiny"
    if "trust_remote_code" in said:
        hint = "read the code that the checkpoint brings along, then model.trust_remote_code=true"
    elif model.gated and any(word in said.lower() for word in ("gated", "401", "403", "access")):
        hint = f"the model is gated: {model.gated}"
    return f"model {model.name}: {source.name} cannot be loaded: {said}\n  hint: {hint}"
