"""Conversion of a GGUF file to a checkpoint that transformers loads: weights in float32, tokenizer, description.

transformers reads the file (the extra ``gguf``); the result is compared with the file's header, because transformers
ignores unknown keys and tensors without a warning, and a model without them would compute something else.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench.errors import ModelError
from kvbench.hub.transfer import amount
from kvbench.models.checkpoint import DamagedFile, check_files, first_line, read_object
from kvbench.models.gguf.header import Header, read_header
from kvbench.models.gguf.place import RECORD, checkpoint_of, finished
from kvbench.models.layer_types import unserved
from kvbench.util import atomic
from kvbench.util.fingerprint import sha256
from kvbench.util.progress import say

#: keys of a header, without the name of the architecture, and the key of transformers' config with the same value
SAME = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary channels",
    "vocab_size": "vocab_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "logit_scale": "logit_scale",
}
#: bytes that a conversion needs beside the weights
_BESIDE = 64 << 20


def converted(file: Path) -> Path:
    """Convert a GGUF file to a checkpoint, unless this was done before, and return the checkpoint's folder.

    Raises:
        ModelError: the extra ``gguf`` is not installed; the file is damaged, or of an architecture that transformers or
            kvbench does not read; or the disk is full. An incomplete checkpoint is removed.
    """
    digest = sha256(file)
    done = finished(digest)
    if done is not None:
        return done
    folder = checkpoint_of(digest)
    header = read_header(file)
    _check_packages(file)
    elements = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    needed = 4 * elements + _BESIDE
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            unfinished = folder.with_name(f".{folder.name}{atomic.ENDING}")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: nobody else holds the lock
            if (folder / RECORD).is_file():
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(folder.parent).free
            if needed > free:
                raise OSError(errno.ENOSPC, "")
            say(f"{file.name}: converting it to float32, once ({amount(needed)} in {folder})")
            try:
                _convert(file, header, elements, unfinished)
                _write_record(unfinished / RECORD, file, header, digest)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"{file} cannot be converted into {folder}: {first_line(error)}.\n{_ELSEWHERE}") from error
        free = shutil.disk_usage(next(place for place in folder.parents if place.is_dir())).free
        raise ModelError(
            f"{file} is not converted: its weights in float32 take {amount(needed)}, and {amount(free)} are free in "
            f"{folder.parent}.\n{_ELSEWHERE}"
        ) from error
    return folder


_ELSEWHERE = "  hint: free some space there, or set KVBENCH_CACHE=FOLDER on another disk for this command and for runs"


def _check_packages(file: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{file} is a GGUF file, which is read with the package '{missing[0]}', and that is not installed.\n"
            "  hint: run pip install 'kvbench[gguf]'"
        )


def _convert(file: Path, header: Header, elements: int, folder: Path) -> None:
    """Write the checkpoint of a GGUF file into a new folder; `elements` counts the elements of all its tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from kvbench.models.gguf.tokenizer import split_as_llamacpp

    common: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    part = "its description"
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(str(file.parent), **common)
            reason = unserved(config)
            if reason:
                raise ModelError(f"{file} is not supported: {reason}")
            check_config(file, header, config)
            part = "its tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **common)
            split_as_llamacpp(tokenizer, header.keys)
            part = "its weights"
            arguments = {**common, "config": config, "dtype": torch.float32, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(str(file.parent), **arguments)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever the libraries that read it raise
        raise ModelError(
            f"{file} cannot be converted: {part} cannot be read ({type(error).__name__}: {first_line(error)}).\n"
            "  hint: use a GGUF file of Llama, Mistral, Qwen2 or Qwen3, or the model's checkpoint: model=OWNER/NAME"
        ) from error
    missing = sorted(report.get("missing_keys") or ())
    parameter_count = sum(weight.numel() for weight in model.parameters())
    if missing or parameter_count != elements:
        lacking = (
            f"lacks {missing[0]}" if missing else f"has {elements} numbers in its tensors, but needs {parameter_count}"
        )
        raise ModelError(
            f"{file} cannot be converted: the model that its header describes ({type(model).__name__}) {lacking}.\n"
            "  hint: its tensors are of another architecture than transformers knows by that name; use the model's "
            "checkpoint: model=OWNER/NAME"
        )
    model.config.quantization_config = None
    del model.config.quantization_config
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None)
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # what depends on this machine or on the versions of packages would change the identity of runs
    _without(folder / "config.json", "transformers_version", "_name_or_path", "_model_name_or_path")
    _without(folder / "generation_config.json", "transformers_version")
    length = header.keys.get(f"{header.architecture}.context_length")
    _without(folder / "tokenizer_config.json", "name_or_path", "is_local", "local_files_only", model_max_length=length)
    check_files(folder)


def check_config(file: Path, header: Header, config: Any) -> None:
    """Raise ModelError unless transformers' config has the value of every architecture key of the header."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    heads = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    values = {
        **text.to_dict(),
        "head_dim": heads,
        "rope_theta": rope.get("rope_theta", getattr(text, "rope_theta", None)),
        "rotary channels": int(heads * (rope.get("partial_rotary_factor") or 1)),
        "experts": getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None),
    }
    prefix = f"{header.architecture}."
    for name, value in header.keys.items():
        if not name.startswith(prefix) or (name, value) == (f"{prefix}rope.scaling.type", "none"):
            continue
        key = SAME.get(name.removeprefix(prefix))
        read = values.get(key) if key else None
        if key is None or not isinstance(read, (int, float)) or not math.isclose(read, _number(value), rel_tol=1e-6):
            shown = "" if read is None else f" (it reads {key}={read})"
            raise ModelError(
                f"{file} cannot be converted: it sets {name}={value}, which transformers does not read as it is "
                f"meant{shown}; the model would compute something else.\n"
                "  hint: use the model's checkpoint in transformers' format: model=OWNER/NAME"
            )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def types(header: Header) -> dict[str, int]:
    """Return how many tensors a GGUF file has of each type, by the type's name, the most frequent first."""
    from gguf import GGMLQuantizationType

    counts = Counter(tensor.type for tensor in header.tensors.values())
    return {GGMLQuantizationType(number).name: count for number, count in counts.most_common()}


def form(header: Header) -> tuple[str, bool]:
    """Return the name of a GGUF file's format, such as ``q4_1`` or ``q4_k_m``, and whether its weights are quantized.

    The name is that of ``general.file_type``; if the tensors contradict this, it is the type of most elements.
    """
    from gguf import GGMLQuantizationType, LlamaFileType

    numbers: Counter[str] = Counter()
    for tensor in header.tensors.values():
        numbers[GGMLQuantizationType(tensor.type).name] += math.prod(tensor.shape)
    whole = {"F32", "F16", "BF16", "F64"}
    packed = Counter({name: count for name, count in numbers.items() if name not in whole})
    if not packed:
        return numbers.most_common(1)[0][0].lower(), False
    try:
        stated = LlamaFileType(header.keys.get("general.file_type")).name.removeprefix("MOSTLY_")
    except ValueError:
        stated = ""
    # Q4_K_M is mostly Q4_K, and so on
    fits = any(stated.startswith(name) for name in packed)
    return (stated if fits else packed.most_common(1)[0][0]).lower(), True


def _write_record(place: Path, file: Path, header: Header, digest: str) -> None:
    name, quantized = form(header)
    content = {
        "sha256": digest,
        "bytes": file.stat().st_size,
        "form": name,
        "quantized": quantized,
        "tensors": types(header),
        "name": str(header.keys.get("general.name", "")),
        "licence": str(header.keys.get("general.license", "")),
    }
    atomic.replace_file(place, json.dumps(content, indent=1).encode() + b"\n")


def _without(file: Path, *names: str, **values: Any) -> None:
    """Remove the keys `names` from a JSON file, and set those in `values`."""
    if not file.is_file():
        return
    content = {key: value for key, value in read_object(file).items() if key not in names} | values
    atomic.replace_file(file, json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True).encode() + b"\n")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Stop transformers from printing progress bars and advice inside a ``with`` block."""
    from transformers.utils import logging

    loud, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(loud)
        if bars:
            logging.enable_progress_bar()


__all__ = ["DamagedFile", "check_config", "converted", "form", "types"]
