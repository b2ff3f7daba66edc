"""Reading and checking of a checkpoint's files without torch.

Only small files and headers are read. A damaged checkpoint is therefore reported before any weights are loaded, and the
error names the file. Sources: the safetensors format (eight bytes of length, a JSON header, the data), and the files
that ``save_pretrained`` of transformers writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.hub.repository import Repository
from kvbench.models.json_files import DamagedFile, json_kind, read_object
from kvbench.models.json_files import first_line as first_line
from kvbench.models.weight_files import check_layers, tensor_names, weight_files
from kvbench.models.weight_files import layer_of as layer_of
from kvbench.util.schema import MOST_TOKENS

#: files other than the weights that loading reads; each contains a JSON object
OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
#: keys of config.json for the longest sequence, in order of precedence
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
#: sizes in config.json, and the largest plausible value of each
LIMITS = {
    "hidden_size": 2**20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**28,
    "intermediate_size": 2**24,
    "sliding_window": 2**40,
    **dict.fromkeys(LENGTHS, 2**40),
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; for multimodal models, the keys of its ``text_config`` take precedence.

    Raises:
        DamagedFile: the file cannot be read, or contains an impossible size.
    """
    file = folder / "config.json"
    data = read_object(file)
    text = data.get("text_config")
    numbers = {**data, **text} if isinstance(text, dict) else data
    check_numbers(numbers, file)
    return numbers


def check_numbers(numbers: Mapping[str, Any], file: Path) -> None:
    """Raise DamagedFile if ``config.json`` contains a size that no model can have, or a ``model_type`` that is no text.

    A size must be an integer within its bounds (:data:`LIMITS`), and the number of KV heads must divide the number of
    query heads.
    """
    for name, most in LIMITS.items():
        number = numbers.get(name)
        if number is None or isinstance(number, list):  # a list has one number per layer, in a few architectures
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise DamagedFile(
                file, f"sets {name}={str(number)[:40]} ({json_kind(number)}), but a whole number is expected", _MEND
            )
        if not 1 <= number <= most:
            raise DamagedFile(file, f"sets {name}={str(number)[:40]}, which is not between 1 and {most}", _MEND)
    heads, groups = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise DamagedFile(
            file, f"sets num_key_value_heads={groups}, which does not divide num_attention_heads={heads}", _MEND
        )
    if not isinstance(numbers.get("model_type", ""), str):
        raise DamagedFile(file, f"sets model_type to {json_kind(numbers['model_type'])} instead of a name", _MEND)


_MEND = "use the config.json that belongs to these weights"


def longest(numbers: Mapping[str, Any]) -> int | None:
    """Return the maximum sequence length in tokens that a ``config.json`` states; None if it states none."""
    length = next((numbers[name] for name in LENGTHS if isinstance(numbers.get(name), int)), None)
    return None if length is None else int(length)


def context(folder: Path) -> int | None:
    """Return the maximum sequence length in tokens that a checkpoint supports; None if its files do not state it.

    ``config.json`` is read first, then ``tokenizer_config.json``; DamagedFile is raised if one cannot be read.
    """
    length = longest(read_config(folder))
    file = folder / "tokenizer_config.json"
    if length is not None or not file.is_file():
        return length
    length = read_object(file).get("model_max_length")  # 1e30 means no limit
    return length if type(length) is int and 0 < length <= MOST_TOKENS else None


def has_chat_template(folder: Path) -> bool:
    """Return True if the tokenizer's files in a checkpoint's folder contain a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_object(file).get("chat_template"))


def check_files(folder: Path) -> None:
    """Check the files of a checkpoint before it is loaded; only the headers of the weight files are read.

    Raises:
        DamagedFile: a file cannot be read or contains impossible values, the index refers to missing files, or the
            weights have fewer layers than ``config.json`` states.
    """
    for name in OBJECTS:
        if (folder / name).is_dir():
            raise DamagedFile(folder / name, "is a folder, not a file")
        if (folder / name).is_file() and name != "config.json":
            read_object(folder / name)
    numbers = read_config(folder)
    if (folder / "generation_config.json").is_file():
        check_ends(read_object(folder / "generation_config.json"), numbers, folder / "generation_config.json")
    names: list[str] = []
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            names += tensor_names(file)
    check_layers(numbers, names, folder)


def check_ends(generation: Mapping[str, Any], numbers: Mapping[str, Any], file: Path) -> None:
    """Raise DamagedFile if an end-of-sequence token in ``generation_config.json`` is outside the vocabulary.

    The vocabulary is that of `numbers`, the content of ``config.json``.
    """
    ends, vocabulary = generation.get("eos_token_id"), numbers.get("vocab_size")
    for token in ends if isinstance(ends, list) else [ends]:
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < (vocabulary or math.inf):
            limit = f" of the vocabulary (vocab_size={vocabulary})" if vocabulary else ""
            raise DamagedFile(
                file,
                f"sets eos_token_id={str(ends)[:60]}, which is not a token{limit}",
                "use the file that belongs to this model",
            )


def snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """Return a repository's folder in the hub's cache; None if the cache does not have its ``config.json``."""
    config = Repository(hub_id, "model", revision).cached("config.json")
    return None if config is None else config.parent
