"""Files of a checkpoint, read and checked without torch: JSON files, and headers of weight files.

Only small files and headers are read. A damaged checkpoint is therefore reported before any weights are loaded, and the
error names the file. Sources: the safetensors format (eight bytes of length, a JSON header, the data), and the files
that ``save_pretrained`` of transformers writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import ModelError
from kvbench.hub.repository import Repository
from kvbench.util.schema import MOST_TOKENS

#: largest JSON file in bytes; the largest vocabularies have tens of MB
JSON_LIMIT = 1 << 30


class DamagedFile(ModelError):
    """Error for a file of a checkpoint that cannot be read or contains impossible values.

    `problem` is a verb phrase, for example ``is a folder, not a file``. `hint` is advice at the end of the message.
    """

    def __init__(self, file: Path, problem: str, hint: str = "copy or download the checkpoint's file again") -> None:
        self.file, self.problem, self.hint = file, problem, hint
        super().__init__(f"{file} cannot be loaded: it {problem}.\n  hint: {hint}")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DamagedFile: the file cannot be read, is larger than 1 GiB, or is not a JSON object.
    """
    try:
        if file.stat().st_size > JSON_LIMIT:
            raise DamagedFile(file, f"has {file.stat().st_size} bytes, which is too large for a file of this kind")
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise DamagedFile(file, "is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise DamagedFile(file, f"cannot be read ({first_line(error)})") from error
    if not isinstance(data, dict):
        raise DamagedFile(file, f"contains {json_kind(data)} instead of a JSON object")
    return data


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the error's type if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__


def json_kind(value: Any) -> str:
    """Return what a JSON value is, in words: ``an object``, ``a list``, ``text``, ..., ``null``."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


#: bits per element of the types of safetensors; the sizes of other types are not checked
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16},
    **{"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
#: largest header in bytes that the safetensors library accepts
HEADER_LIMIT = 100_000_000
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the weight files that transformers loads from a checkpoint's folder.

    These are a single file, or the shards that an index file lists. Safetensors files take precedence over pickled
    ones.

    Raises:
        DamagedFile: the index cannot be read, or lists files that are missing or in other folders.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            yield folder / single
            return
        if not (folder / index).is_file():
            continue
        table = read_object(folder / index).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise DamagedFile(folder / index, "has no valid weight_map from tensors to files")
        named = sorted(set(table.values()))
        outside = [name for name in named if Path(name).name != name]
        if outside:
            raise DamagedFile(folder / index, f"refers to {outside[0]}, which is outside its own folder")
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise DamagedFile(folder / index, f"refers to {len(named)} files, of which {missing[0]}{more} missing")
        yield from (folder / name for name in named)
        return


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, as :func:`tensor_types` does."""
    return list(tensor_types(file))


def tensor_types(file: Path) -> dict[str, tuple[str, int]]:
    """Return the type and the number of dimensions of each tensor in a safetensors file; only its header is read.

    Types have the names of the safetensors format, such as ``BF16``.

    Raises:
        DamagedFile: the header cannot be read, or contradicts the size of the file or the shape of a tensor.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT):
                raise DamagedFile(
                    file, f"is not a safetensors file (size: {size} bytes; size of its header: {length} bytes)"
                )
            header = json.loads(handle.read(length))
    except RecursionError:
        raise DamagedFile(file, "has a header that is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise DamagedFile(file, f"has a header that cannot be read ({first_line(error)})") from error
    if not isinstance(header, dict):
        raise DamagedFile(file, f"has a header that is {json_kind(header)}, not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in tensors.items():
        place = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(place, list) and len(place) == 2 and all(isinstance(offset, int) for offset in place)):
            raise DamagedFile(file, f"has a header that does not give the position of the tensor {name}")
        end = max(end, place[1])
        bits, shape = BITS.get(str(entry.get("dtype"))), entry.get("shape")
        if bits and isinstance(shape, list) and all(isinstance(length, int) for length in shape):
            wanted = bits * math.prod(shape) // 8
            if wanted != place[1] - place[0]:
                given = place[1] - place[0]
                problem = (
                    f"has a header that gives {name} {given} bytes, but {entry['dtype']} of shape "
                    f"{shape} takes {wanted}"
                )
                raise DamagedFile(file, problem)
    if end != size - 8 - length:
        raise DamagedFile(
            file,
            f"has {size - 8 - length} bytes of tensors instead of the {end} that its header gives, so it is incomplete",
        )
    return {name: (str(entry.get("dtype")), len(entry.get("shape") or ())) for name, entry in tensors.items()}


def check_layers(numbers: Mapping[str, Any], names: list[str], folder: Path) -> None:
    """Raise DamagedFile if the weights have fewer layers than ``config.json`` states.

    transformers would fill the missing layers with random weights. `names` are those of all tensors of the weights.
    """
    count = numbers.get("num_hidden_layers")
    stored = {number for name in names if (number := layer_of(name)) is not None and "vision" not in name}
    if isinstance(count, int) and stored and max(stored) + 1 < count:
        raise DamagedFile(
            folder / "config.json",
            f"sets num_hidden_layers={count}, but the weights have only {max(stored) + 1} layers; "
            "the missing layers would be random",
            "add the missing weights, or use the config.json that belongs to these weights",
        )


def layer_of(name: str) -> int | None:
    """Return the index of the layer in a tensor's name; None if the tensor is not part of a layer."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


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
    """Raise DamagedFile if ``config.json`` contains a size that no model can have, or its ``model_type`` is not text.

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
