"""Loading of a model and its tokenizer: from the hub, a folder or this package, or with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError, ModelError
from kvbench.models.devices import Runtime, homes, joined, resolve_device
from kvbench.models.download import fetched
from kvbench.models.layers import attending
from kvbench.models.locate import Source
from kvbench.models.random_weights import byte_tokenizer, hf_config, random_model
from kvbench.models.spec import ModelConfig
from kvbench.models.verify import check_complete, check_served, refusal
from kvbench.util.attachment import placement
from kvbench.util.failures import is_out_of_memory

__all__ = ["LoadedModel", "Shape", "load", "load_tokenizer", "resolve_device", "resolve_dtype", "shape_of"]

if TYPE_CHECKING:
    import torch

    from kvbench.parallel.team import Team


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model on which the size of its KV cache depends.

    Args:
        model_type: transformers' name of the architecture, for example ``llama``.
        layers: number of layers with keys and values.
        heads: number of query heads per layer.
        kv_heads: number of KV heads per layer.
        head_dim: number of channels per head.
        hidden_size: number of channels of the hidden states.
        vocab_size: number of tokens in the vocabulary.
    """

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
        name: name of the model in the configuration.
        dtype: dtype of the parameters.
        device: device on which inputs must be: the first device of the model, or this rank's device with
            ``tensor_parallel``.
        max_length: maximum sequence length in tokens, prompt and answer together.
        architecture: dimensions of the model.
        eos_token_ids: tokens that end an answer; empty for random weights, which would emit them by chance.
        parameters: number of parameters of the model, over all devices.
        random_weights: True if the weights are random; scores are then meaningless.
        devices: torch's names of all devices that hold the model, including those of other ranks.
        layout: distribution of the model. ``one device``, ``device_map`` (layers spread over GPUs of this process) or
            ``tensor_parallel`` (every layer split over several processes).
        weights: description of weights in 4 bits (:func:`kvbench.models.int4.described`); None if they are in full
            precision.
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
    devices: tuple[str, ...] = ()
    layout: str = "one device"
    weights: dict[str, Any] | None = None


def load(model: ModelConfig, runtime: Runtime) -> LoadedModel:
    """Load a model and its tokenizer onto the devices that `runtime` names.

    Args:
        model: the configuration group `model`, already checked.
        runtime: the configuration group `runtime`.

    Raises:
        ModelError: the weights are unavailable or damaged, transformers cannot load them, kvbench does not support the
            architecture, or the model cannot be split over the processes.
        ConfigError: the device does not exist on this machine.
    """
    from kvbench.models.int4 import described, own_parameters

    source = fetched(model)
    team, spread = joined(runtime), homes(runtime)
    device = spread[0]
    if runtime.device_map and not model.random and importlib.util.find_spec("accelerate") is None:
        raise ModelError(
            "runtime.device_map needs the package 'accelerate'.\n  hint: run pip install 'kvbench[multigpu]'"
        )
    if model.random:
        tokenizer = _random_tokenizer(model)
        check_served(model, hf_config(model), tokenizer)
        loaded = _random(model, spread, runtime)
        if model.rounding:
            from kvbench.models.quantized.loading import round_model

            round_model(loaded, model.rounding)
    else:
        loaded, tokenizer = _pretrained(model, source, spread, runtime.device_map, team)
    return LoadedModel(
        model=loaded,
        tokenizer=tokenizer,
        name=model.name,
        dtype=loaded.dtype,
        device=loaded.device,
        max_length=model.max_length,
        architecture=shape_of(loaded.config),
        eos_token_ids=() if model.random else _eos_token_ids(loaded, tokenizer),
        parameters=placement(loaded).parameters or own_parameters(loaded),
        random_weights=model.random,
        devices=tuple(map(str, spread)) if team is None else tuple(f"{device.type}:{n}" for n in range(team.size)),
        layout="tensor_parallel" if team is not None else "device_map" if runtime.device_map else "one device",
        weights=described(loaded),
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer that :func:`load` would load, without the weights.

    Raises:
        ModelError: the tokenizer or the weights are unavailable, or the tokenizer cannot be read.
    """
    source = fetched(model)
    if source.name is None:
        return _random_tokenizer(model)
    common = {
        "revision": source.revision,
        "local_files_only": source.local,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        return _tokenizer(source.name, common)
    except Exception as error:  # damaged files raise whatever the libraries that read them raise
        raise refusal(model, source, error, "tokenizer") from error


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a value of ``model.dtype``.

    Args:
        name: torch's name of the dtype, or ``auto``. ``auto`` is bfloat16 on a CUDA GPU and float32 on other devices,
            where float32 is faster. Only random weights use it on a GPU: a checkpoint keeps its own dtype there.
        device: device of the model.
    """
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def shape_of(config: Any) -> Shape:
    """Return the dimensions of a model's decoder from its transformers config."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return Shape(
        model_type=text.model_type,
        layers=len(attending(config)),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _random(model: ModelConfig, devices: Sequence[torch.device], runtime: Runtime) -> Any:
    """Return a model with random weights on `devices`; each rank of a team draws all weights and keeps its slices."""
    config, dtype, team = hf_config(model), resolve_dtype(model.dtype, devices[0]), joined(runtime)
    if runtime.device_map:
        from kvbench.parallel.spread import random_spread

        return random_spread(config, dtype, devices, runtime.seed)
    whole = random_model(config, dtype, devices[0], runtime.seed)
    if team is not None:
        from kvbench.parallel.shard import shard

        shard(whole, team)
    return whole


def _pretrained(
    model: ModelConfig, source: Source, devices: Sequence[torch.device], device_map: str | None, team: Team | None
) -> tuple[Any, Any]:
    """Return model and tokenizer; the ranks of a team load in turn, so that only one at a time holds all weights."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from kvbench.models.quantized.plan import check_whole, plan_of

    assert source.name is not None
    device = devices[0]
    common = {
        "revision": source.revision,
        "local_files_only": source.local,
        "trust_remote_code": model.trust_remote_code,
    }
    # except on a CPU, auto is the checkpoint's own dtype
    dtype = "auto" if model.dtype == "auto" and device.type != "cpu" else resolve_dtype(model.dtype, device)
    bars, loud = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if source.local:
        logging.disable_progress_bar()
    logging.set_verbosity_error()  # check_complete reports missing weights by name
    try:
        turn: AbstractContextManager[None] = team.turns() if team is not None else nullcontext()
        with turn:
            part = "config.json"
            try:  # small files first, so that a wrong tokenizer is found before 70 GB of weights are read
                config = AutoConfig.from_pretrained(source.name, **common)
                part = "tokenizer"
                tokenizer = _tokenizer(source.name, common)
                check_served(model, config, tokenizer)
                part = "weights"
                plan = plan_of(model, source, config)
                if plan is not None:
                    check_whole(model, team is not None)
                    common |= plan.arguments(config)
                loaded, report = _weights(source.name, devices, device_map, dtype, common)
            except Exception as error:  # damaged files raise whatever the libraries that read them raise
                if is_out_of_memory(error) or isinstance(error, KvbenchError):
                    raise
                raise refusal(model, source, error, part) from error
            check_complete(model, source, loaded, report if plan is None else plan.settle(report))
            if team is not None:
                from kvbench.parallel.shard import shard

                shard(loaded, team)
            elif not device_map:
                loaded = loaded.to(device)
            if plan is not None:
                plan.fill(loaded, device)
    finally:
        logging.set_verbosity(loud)
        if bars:
            logging.enable_progress_bar()
    return loaded, tokenizer


def _weights(
    name: str, devices: Sequence[torch.device], device_map: str | None, dtype: Any, common: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the model, and transformers' report of missing, unexpected and mismatched parameters."""
    from transformers import AutoModelForCausalLM

    from kvbench.parallel.spread import pretrained_spread

    # have tensors of other shapes reported by name, too; by default transformers only says that there are some
    arguments = {**common, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if device_map:
        return pretrained_spread(name, devices, **arguments)
    loaded, report = AutoModelForCausalLM.from_pretrained(name, **arguments)
    return loaded.eval(), report


def _random_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer in the model's folder if it has one, else the byte tokenizer."""
    folder = model.folder()
    if folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        try:
            return _tokenizer(str(folder), {"local_files_only": True, "trust_remote_code": model.trust_remote_code})
        except Exception as error:
            raise refusal(model, Source(str(folder), local=True), error, "tokenizer") from error
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
