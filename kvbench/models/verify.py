"""Checks that a checkpoint agrees with its config.json, and errors for checkpoints that cannot be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import ModelError
from kvbench.models.checkpoint import DamagedFile, check_files, layer_of, weight_files
from kvbench.models.layer_types import unserved
from kvbench.models.locate import Source
from kvbench.models.spec import ModelConfig
from kvbench.util.progress import say


def check_served(model: ModelConfig, config: Any, tokenizer: Any) -> None:
    """Raise ModelError if kvbench does not support a model, or its tokenizer has tokens without an embedding."""
    reason = unserved(config)
    if reason:
        raise ModelError(f"model {model.name}: {reason}")
    words = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if words is not None:
        check_vocabulary(model.name, tokenizer, int(words))


def check_vocabulary(name: str, tokenizer: Any, words: int) -> None:
    """Raise ModelError if the tokenizer can produce ids for which the model has no embedding.

    Added tokens that do not occur in text, such as Gemma 3's image tokens, are exempt, but not those for padding or for
    the beginning or end of a sequence. `words` is the number of the model's embeddings (``vocab_size``).
    """
    used = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    added = set(tokenizer.get_added_vocab())
    beyond = {
        token: index
        for token, index in tokenizer.get_vocab().items()
        if index >= words and (token not in added or index in used)
    }
    if beyond:
        token = min(beyond, key=beyond.__getitem__)
        raise ModelError(
            f"model {name}: its tokenizer has {len(beyond)} tokens without an embedding in the model: vocab_size is "
            f"{words}, but {token!r} has id {beyond[token]}.\n"
            "  hint: use the tokenizer's files that belong to these weights"
        )


def check_complete(model: ModelConfig, source: Source, loaded: Any, report: Mapping[str, Any]) -> None:
    """Raise ModelError if the tensors of a loaded checkpoint do not match its ``config.json``.

    That is the case if the report of transformers says that tensors are missing (it would fill them with random
    values), have another shape, or belong to layers beyond the configured number. Other tensors that the model does not
    use are only reported.
    """
    missing = sorted(report.get("missing_keys") or ())
    shapes = sorted(report.get("mismatched_keys") or ())
    layers = int(getattr(loaded.config.get_text_config(decoder=True), "num_hidden_layers", 0) or 0)
    unused = sorted(report.get("unexpected_keys") or ())
    beyond = [key for key in unused if (layer_of(key) or -1) >= layers > 0]
    head = f"model {model.name}: {source.name}"
    if missing:
        raise ModelError(
            f"{head} lacks {_tensor_count(missing)} that its config.json requires: {_some(missing)}. Their values "
            "would be random.\n  hint: copy or download the checkpoint again, or use the config.json that belongs to it"
        )
    if shapes:
        key, stored, wanted = shapes[0]
        raise ModelError(
            f"{head} has {_tensor_count(shapes)} whose shape does not match its config.json: {key} is {list(stored)}, "
            f"not {list(wanted)}.\n  hint: use the config.json that belongs to these weights"
        )
    if beyond:
        raise ModelError(
            f"{head} has {_tensor_count(beyond)} for more layers than its config.json describes ({layers}): "
            f"{_some(beyond)}. They would be ignored.\n  hint: use the config.json that belongs to these weights"
        )
    if unused:
        say(f"{head} has {_tensor_count(unused)} that the model does not use: {_some(unused)}")


def _tensor_count(names: Sequence[Any]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def unloadable_error(model: ModelConfig, source: Source, error: Exception, part: str) -> ModelError:
    """Return the ModelError for a checkpoint that cannot be loaded.

    Its message names the damaged file if there is one, and otherwise quotes the exception of the library that read the
    `part`: ``config.json``, ``tokenizer`` or ``weights``.
    """
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:
        hint = "review the code in the checkpoint, then set model.trust_remote_code=true"
        return ModelError(f"model {model.name}: {source.name} cannot be loaded: {message}\n  hint: {hint}")
    folder = Path(source.name) if source.name and Path(source.name).is_dir() else None
    file = f"its {part}"
    try:
        if folder is not None:
            check_files(folder)
            files = [weights.name for weights in weight_files(folder)] if part == "weights" else []
            file = f"its {files[0]}" if len(files) == 1 else file
    except DamagedFile as damaged:
        return damaged
    hint = "set model.path=DIR, model.weights=random or model=tiny"
    if type(error).__name__ == "UnpicklingError" or "weights_only" in message:
        message = f"{file} is damaged, or contains code in addition to tensors, which kvbench never runs"
        hint = "use a checkpoint in the safetensors format"
    elif model.gated and any(word in message.lower() for word in ("gated", "401", "403", "access")):
        hint = f"get access to the gated model: {model.gated}"
    elif not isinstance(error, (OSError, ImportError)):
        doing = f"building it from its config.json and {file} failed" if part == "weights" else f"{file} cannot be read"
        message = f"{doing}: {type(error).__name__}: {message[:400]}"
    return ModelError(f"model {model.name}: {source.name} cannot be loaded: {message}\n  hint: {hint}")
