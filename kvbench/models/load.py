"""Loading of a model and its tokenizer: from the hub, a folder or this package, or with seeded random weights.

The memory and time of a cache do not depend on the model's answers, so a 7B model can be measured without its weights.
The scores of such a model are meaningless, and its tokenizer has a token per byte.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError, ModelError
from kvbench.models.devices import Runtime, homes, join_team, resolve_device
from kvbench.models.gguf.place import dequantized
from kvbench.models.layers import attending
from kvbench.models.locate import Source, fetched
from kvbench.models.outliers import outliers
from kvbench.models.spec import Architecture, ModelConfig
from kvbench.models.verify import check_complete, check_served, unloadable_error
from kvbench.util.attachment import placement, record_placement
from kvbench.util.failures import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from kvbench.models.arithmetic import Dtypes
    from kvbench.parallel.team import Team


#: the first tokens of the byte tokenizer (padding, begin, end); the 256 bytes follow
SPECIALS = ("<pad>", "<s>", "</s>")


def hf_config(model: ModelConfig) -> Any:
    """Return the transformers config from which a model with random weights is built.

    It is the ``config.json`` in the model's folder. Without a folder, it is built from ``model.architecture``.

    Raises:
        ModelError: transformers does not support the architecture, or rejects its sizes.
    """
    from transformers import AutoConfig

    folder = model.folder()
    try:
        if folder is not None:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=model.trust_remote_code)
        assert model.architecture is not None  # ModelConfig.check
        return _from_architecture(model.architecture)
    except (OSError, ValueError, KeyError) as error:
        origin = "model.architecture" if folder is None else f"{folder / 'config.json'}"
        raise ModelError(
            f"model {model.name}: transformers does not accept its architecture: {error}\n  hint: correct {origin}"
        ) from error


def _from_architecture(numbers: Architecture) -> Any:
    from transformers import AutoConfig

    named = {name: value for name, value in vars(numbers).items() if value is not None}
    for name in ("model_type", "parameters", "rope"):
        named.pop(name, None)
    named["sliding_window"] = numbers.sliding_window  # None too: MistralConfig's default is a window of 4096 tokens
    # Any ids inside the vocabulary would do.
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(numbers.model_type, rope_parameters=dict(numbers.rope), **named, **ids)


def random_model(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int) -> Any:
    """Return a causal language model with random parameters, drawn on `device`, in evaluation mode.

    The global random state is not changed. A GPU and a CPU draw different numbers from the same seed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        with place:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def byte_tokenizer() -> Any:
    """Return a fast tokenizer whose tokens are UTF-8 bytes; it needs no download and accepts any text.

    Ids above 258, which a random model may generate, decode to the empty string. The tokenizer has no EOS token,
    because a random model would generate it by chance.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # sorted, because the library's order varies
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


__all__ = ["LoadedModel", "Shape", "load_model", "load_tokenizer", "resolve_device", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model on which the size of its KV cache depends.

    `model_type` is transformers' name of the architecture, for example ``llama``. `layers` counts only layers with keys
    and values.
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
        model: a transformers causal LM on `device`.
        tokenizer: a fast tokenizer that pads on the left and has a pad token.
        device: device on which inputs must be: the first device of the model, or this rank's device with
            ``tensor_parallel``.
        max_length: maximum sequence length in tokens, prompt and answer together.
        eos_token_ids: tokens that end an answer; empty for random weights, which would emit them by chance.
        parameters: number of parameters of the model, over all devices.
        devices: torch's names of all devices that hold the model, including those of other ranks.
        layout: distribution of the model. ``one device``, ``device_map`` (layers spread over GPUs of this process) or
            ``tensor_parallel`` (every layer split over several processes).
        weights: description of weights in 4 bits (:func:`kvbench.models.int4.int4_description`); None if they are in
            full precision.
        dequantized: format that the weights had before they were converted to float32, for example ``gguf q4_1``; None
            if they were in full precision.
    """

    model: Any
    tokenizer: Any
    name: str
    dtypes: Dtypes
    device: torch.device
    max_length: int
    architecture: Shape
    eos_token_ids: tuple[int, ...]
    parameters: int
    random_weights: bool
    devices: tuple[str, ...] = ()
    layout: str = "one device"
    weights: dict[str, Any] | None = None
    dequantized: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.dtypes.arithmetic

    @property
    def storage(self) -> torch.dtype:
        """Dtype of what caches store in full precision."""
        return self.dtypes.storage


def load_model(model: ModelConfig, runtime: Runtime) -> LoadedModel:
    """Load a model and its tokenizer onto the devices that `runtime` names; the configuration must have been checked.

    Raises:
        ModelError: the weights are unavailable or damaged, transformers cannot load them, kvbench does not support the
            architecture, or the model cannot be split over the processes.
        ConfigError: the device does not exist on this machine.
    """
    from kvbench.models.int4 import int4_description, own_parameters

    source = fetched(model)
    team, spread = join_team(runtime), homes(runtime)
    device = spread[0]
    if runtime.device_map and not model.random and importlib.util.find_spec("accelerate") is None:
        raise ModelError(
            "runtime.device_map needs the package 'accelerate'.\n  hint: run pip install 'kvbench[multigpu]'"
        )
    if model.random:
        tokenizer = _random_tokenizer(model)
        check_served(model, hf_config(model), tokenizer)
        loaded, widths = _random(model, spread, runtime)
        if model.rounding:
            from kvbench.models.quantized.loading import round_model

            round_model(loaded, model.rounding)
    else:
        loaded, tokenizer, widths = _pretrained(model, source, spread, runtime, team)
    record_placement(loaded, replace(placement(loaded), storage=widths.storage))
    return LoadedModel(
        model=loaded,
        tokenizer=tokenizer,
        name=model.name,
        dtypes=replace(widths, arithmetic=loaded.dtype),
        device=loaded.device,
        max_length=model.max_length,
        architecture=shape_of(loaded.config),
        eos_token_ids=() if model.random else _eos_token_ids(loaded, tokenizer),
        parameters=placement(loaded).parameters or own_parameters(loaded),
        random_weights=model.random,
        devices=tuple(map(str, spread)) if team is None else tuple(f"{device.type}:{n}" for n in range(team.size)),
        layout="tensor_parallel" if team is not None else "device_map" if runtime.device_map else "one device",
        weights=int4_description(loaded),
        dequantized=None if model.random else dequantized(model.folder()),
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer that :func:`load_model` would load, without the weights.

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
        raise unloadable_error(model, source, error, "tokenizer") from error


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


def _random(model: ModelConfig, devices: Sequence[torch.device], runtime: Runtime) -> tuple[Any, Dtypes]:
    """Return a model with random weights on `devices`; each rank of a team draws all weights, then keeps its slices.

    The weights are drawn in the storage dtype, so that they do not depend on ``runtime.arithmetic``.
    """
    from kvbench.models.arithmetic import dtypes

    config, team = hf_config(model), join_team(runtime)
    widths = dtypes(model.dtype, runtime, devices[0], config, drawn=True)
    if runtime.device_map:
        from kvbench.parallel.spread import random_spread

        whole = random_spread(config, widths.storage, devices, runtime.seed)
    else:
        whole = random_model(config, widths.storage, devices[0], runtime.seed)
    _make_outliers(model, whole)
    if widths.arithmetic != widths.storage:  # else RoPE's frequencies, which are in float32, would be rounded too
        whole = whole.to(widths.arithmetic)
    if team is not None:
        from kvbench.parallel.shard import shard

        shard(whole, team)
    return whole, widths


def _pretrained(
    model: ModelConfig, source: Source, devices: Sequence[torch.device], runtime: Runtime, team: Team | None
) -> tuple[Any, Any, Dtypes]:
    """Return model, tokenizer and dtypes; the ranks of a team load in turn, so that one at a time holds all weights."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from kvbench.models.arithmetic import dtypes
    from kvbench.models.quantized.plan import check_whole, plan_of, safetensors

    assert source.name is not None
    device, device_map = devices[0], runtime.device_map
    common = {
        "revision": source.revision,
        "local_files_only": source.local,
        "trust_remote_code": model.trust_remote_code,
    }
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
                widths = dtypes(
                    model.dtype, runtime, device, config, safetensors(source), exact=bool(dequantized(model.folder()))
                )
                plan = plan_of(model, source, config)
                if plan is not None:
                    check_whole(model, team is not None)
                    common |= plan.arguments(config)
                loaded, report = _weights(source.name, devices, device_map, widths.arithmetic, common)
            except Exception as error:  # damaged files raise whatever the libraries that read them raise
                if is_out_of_memory(error) or isinstance(error, KvbenchError):
                    raise
                raise unloadable_error(model, source, error, part) from error
            check_complete(model, source, loaded, report if plan is None else plan.settle(report))
            _make_outliers(model, loaded)
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
    return loaded, tokenizer, widths


def _make_outliers(model: ModelConfig, loaded: Any) -> None:
    chosen = outliers(model.outliers)
    if chosen is not None:
        from kvbench.models.make_outliers import make_outliers

        make_outliers(model.name, loaded, chosen)


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
            raise unloadable_error(model, Source(str(folder), local=True), error, "tokenizer") from error
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
